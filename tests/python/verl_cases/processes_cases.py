"""bough.verl in two processes on the CPU. The references are one process with the whole batch, and verl's
FSDP engine in two processes.

This file is also the program of the processes."""

import os
import subprocess
import sys

import pytest
import torch
from verl.models.transformers import monkey_patch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl_util import (
    LORA,
    LOSSES,
    assert_same_gradients,
    gradients,
    make_engine,
    ppo_batch,
    value_loss_fn,
    with_random_adapters,
)

NUM_PROCESSES = 2
CONTENTS = ["model", "optimizer", "extra"]
KINDS = {
    "policy": {},
    "bf16": {"mixed_precision": None},
    "lora": {"model": LORA},
    "critic": {"kind": "value_model"},
}


def loss_of(kind):
    return value_loss_fn() if kind == "critic" else LOSSES["ppo"][1]


def engine_of(folder, kind):
    checkpoint = CheckpointConfig(save_contents=CONTENTS, load_contents=CONTENTS)
    return make_engine(folder, checkpoint=checkpoint, **KINDS[kind])


def weights(engine):
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def step_of_half(engine, kind, rank):
    batch = ppo_batch(micro_batch_size_per_gpu=1)
    half = tu.index_select_tensor_dict(batch, torch.arange(3) + 3 * rank)
    with engine.train_mode():
        engine.forward_backward_batch(half, loss_of(kind))
        return gradients(engine), engine.optimizer_step()


def work_of_rank(folder, kind, out, rank):
    """The gradients of this process' half of the batch, weights after a step, and what a checkpoint loads."""
    rank = int(rank)
    monkey_patch.is_trl_available = lambda: False  # as verl_fixtures.py
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{out}/store", rank=rank, world_size=NUM_PROCESSES
    )
    torch.manual_seed(rank)  # random adapters would differ
    engine = engine_of(folder, kind)
    found = {"start": weights(engine)}
    with_random_adapters(engine)
    found["gradients"], found["norm"] = step_of_half(engine, kind, rank)
    found["weights"] = weights(engine)
    if kind in ("policy", "lora"):
        fsdp = make_engine(folder, reference=True, **KINDS[kind])
        with_random_adapters(fsdp)
        found["fsdp_gradients"], found["fsdp_norm"] = step_of_half(fsdp, kind, rank)
    engine.save_checkpoint(f"{out}/checkpoint")
    random = torch.rand(2)
    again = engine_of(folder, kind)
    again.load_checkpoint(f"{out}/checkpoint")
    assert torch.equal(torch.rand(2), random)
    found["loaded"] = weights(again)
    torch.save(found, f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


def run_processes(folder, kind, out):
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, folder, kind, out, str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(NUM_PROCESSES)
    ]
    assert [process.wait(300) for process in processes] == [0] * NUM_PROCESSES
    return [torch.load(f"{out}/{rank}.pt") for rank in range(NUM_PROCESSES)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(model_folder, critic_folder, tmp_path, kind):
    folder = critic_folder if kind == "critic" else model_folder
    ranks = run_processes(folder, kind, tmp_path)
    engine = engine_of(folder, kind)
    with_random_adapters(engine)
    with engine.train_mode():
        engine.forward_backward_batch(ppo_batch(), loss_of(kind))
        expected = gradients(engine)
        norm = engine.optimizer_step()
    tolerance = 0.05 if kind == "bf16" else 1e-5
    for rank in ranks:
        assert rank["norm"] == pytest.approx(norm, rel=10 * tolerance)
        assert rank.get("fsdp_norm", norm) == pytest.approx(norm, rel=10 * tolerance)
        for got in (rank["gradients"], rank.get("fsdp_gradients", expected)):
            assert_same_gradients(got, expected, tolerance)
        for name, value in ranks[0]["weights"].items():
            assert torch.equal(rank["start"][name], ranks[0]["start"][name])
            assert torch.equal(rank["weights"][name], value) and torch.equal(rank["loaded"][name], value)


if __name__ == "__main__":
    work_of_rank(*sys.argv[1:])
