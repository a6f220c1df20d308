"""Several processes that train one model: TreeEngine(process_group=...), and TRL started by accelerate's
variables.

This file is also the program of the processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 2
SEQUENCES = [([5, 6, 7, 8], [9, 10]), ([5, 6, 7, 8], [11]), ([5, 6], [12, 13, 14]), ([30, 31], [32])]


def run_processes(work, tmp_path):
    """Runs work in NUM_PROCESSES processes; each writes a file, which are returned in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(str(ROOT / name) for name in ("python", "tests", "tests/python"))
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, work, str(tmp_path)],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(NUM_PROCESSES),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "ACCELERATE_USE_CPU": "true",
            },
        )
        for rank in range(NUM_PROCESSES)
    ]
    assert [process.wait(600) for process in processes] == [0] * NUM_PROCESSES
    return [torch.load(tmp_path / f"{work}-{rank}.pt") for rank in range(NUM_PROCESSES)]


def step_of_rank(folder, rank):
    import bough
    from tiny_models import make_tiny_model

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(make_tiny_model("qwen3", seed=2))
    engine = bough.TreeEngine(model.module, process_group=torch.distributed.group.WORLD)
    own = SEQUENCES[2 * rank : 2 * rank + 2]
    engine(own)[0].mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.module.named_parameters()}
    model.zero_grad()
    count = sum(len(response) for _, response in own)
    engine.step(own, lambda lp, ent, rows: lp.sum() / count)
    by_step = {name: p.grad.clone() for name, p in model.module.named_parameters()}
    torch.save({"autograd": gradients, "step": by_step}, folder / f"step-{rank}.pt")
    torch.distributed.destroy_process_group()


def trl_of_rank(folder, rank):
    from bough.trl import TreeGRPOTrainer
    from test_trl import run
    from trl import GRPOTrainer

    results = {}
    for name, kind, extra in (
        ("plain", GRPOTrainer, {}),
        ("tree", TreeGRPOTrainer, {"keep_groups": False}),
    ):
        own = folder / f"{name}-{rank}"
        own.mkdir()
        trainer, norms, _ = run(
            kind, own, str(folder / "model"), steps=6, extra=extra, per_device_train_batch_size=4
        )
        model = trainer.accelerator.unwrap_model(trainer.model)
        results[name] = {"norms": norms, **{n: p.detach().clone() for n, p in model.named_parameters()}}
    torch.save(results, folder / f"trl-{rank}.pt")


def test_gradients_are_averaged_over_the_processes(tmp_path):
    import bough
    from tiny_models import make_tiny_model

    model = make_tiny_model("qwen3", seed=2)
    engine = bough.TreeEngine(model)
    for half in (SEQUENCES[:2], SEQUENCES[2:]):
        (engine(half)[0].mean() / 2).backward()
    for result in run_processes("step", tmp_path):
        for gradients in result.values():
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_trl_trains_the_same_weights_in_two_processes(tmp_path):
    from tiny_models import make_tiny_model

    make_tiny_model("qwen3_tied", seed=3).save_pretrained(tmp_path / "model")
    first, second = run_processes("trl", tmp_path)
    for result in (first, second):
        plain, tree = result["plain"], result["tree"]
        plain_norms, tree_norms = plain.pop("norms"), tree.pop("norms")
        assert len(plain_norms) == 6 or result is second  # only the first process logs
        torch.testing.assert_close(torch.tensor(tree_norms), torch.tensor(plain_norms), rtol=1e-3, atol=1e-6)
        for name, value in plain.items():
            assert (value - tree[name]).norm() <= 1e-4 * max(value.norm(), 1e-3), name
    assert all(torch.equal(value, second["tree"][name]) for name, value in first["tree"].items())


if __name__ == "__main__":
    work, folder = sys.argv[1:]
    {"step": step_of_rank, "trl": trl_of_rank}[work](Path(folder), int(os.environ["RANK"]))
