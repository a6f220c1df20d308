"""The memory of models: planned when a model is created, and shared by more models than fit."""

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from order_cases import STEP, assert_same, batches
from tinker_util import Service

import tinker
from tinker import types

MODELS, ROUNDS, RANK = 40, 2, 4


@pytest.fixture(scope="module")
def small(program, models, tmp_path_factory):
    """A service whose memory has room for three models of RANK."""
    folder = tmp_path_factory.mktemp("small")
    settings = ["--dtype", "fp32", "max_models=64", "model_memory=600000", "memory=64MiB"]
    with Service(program, models("qwen3"), folder, *settings) as one:
        yield one


def num_parked(service) -> int:
    """Models in files without a name."""
    parked = 0
    for file in Path(f"/proc/{service.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the service has closed it since
            parked += ".scratch-" in os.readlink(file)
    return parked


def train(client, number, rounds):
    for batch in batches(rounds, seed=number):
        client.forward_backward(batch, "cross_entropy")
        client.optim_step(STEP)


def test_many_models_in_a_little_memory_train_as_each_does_alone(small):
    clients = [small.train(rank=RANK, seed=number) for number in range(MODELS)]
    data = [batches(2 * ROUNDS, seed=number) for number in range(MODELS)]
    for step in range(ROUNDS):
        for part in (0, 1):  # a model leaves the memory with its gradients
            pending = [
                client.forward_backward(data[number][2 * step + part], "cross_entropy")
                for number, client in enumerate(clients)
            ]
            for each in pending:
                each.result()
        for each in [client.optim_step(STEP) for client in clients]:
            each.result()
    assert num_parked(small) == MODELS - 3
    for number in (0, 1, 7, MODELS - 1):
        alone = small.train(rank=RANK, seed=number)
        for step in range(ROUNDS):
            for part in (0, 1):
                alone.forward_backward(data[number][2 * step + part], "cross_entropy").result()
            alone.optim_step(STEP).result()
        assert_same(small.weights(clients[number]), small.weights(alone))
    assert not [file for file in small.folder.iterdir() if file.is_file() and not file.name.startswith(".")]


def test_a_model_that_does_not_fit_is_refused_with_what_helps(small):
    with pytest.raises(tinker.BadRequestError, match="a rank of at most .* fits") as refused:
        small.train(rank=16)
    assert "model_memory" in str(refused.value) and "optimizer" in str(refused.value)
    small.train(rank=16, train_unembed=False, train_mlp=False)


def test_a_model_that_is_not_used_leaves_the_memory_and_comes_back(program, models, tmp_path):
    with Service(program, models("qwen3"), tmp_path, "--dtype", "fp32", "idle_seconds=0.3") as service:
        resting, awake = service.train(rank=RANK, seed=1), service.train(rank=RANK, seed=1)
        for client in (resting, awake):
            train(client, 1, 1)
        deadline = time.monotonic() + 60
        while num_parked(service) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert num_parked(service) == 2
        for client in (resting, awake):
            train(client, 2, 2)
        assert_same(service.weights(resting), service.weights(awake))


def test_a_long_queue_of_one_client_delays_another_by_one_turn(service):
    """The first client sends 24 large batches at once. The second trains and samples meanwhile."""
    greedy, modest = service.train(rank=RANK, seed=1), service.train(rank=RANK, seed=2)
    sampler = modest.save_weights_and_get_sampling_client().result()
    generator = torch.Generator().manual_seed(3)
    large = []
    for _ in range(64):
        tokens = torch.randint(3, 300, (120,), generator=generator).tolist()
        large.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:]},
            )
        )
    done = []
    pending = []
    for _ in range(24):
        pending.append(greedy.forward_backward(large, "cross_entropy"))
        pending.append(greedy.optim_step(STEP))
    pending[0].result()

    def follow():
        for number, each in enumerate(pending):
            each.result()
            done.append(number)

    thread = threading.Thread(target=follow)
    thread.start()
    train(modest, 5, 5)
    modest.forward(batches(1)[0], "cross_entropy").result()
    after_training = len(done)
    parameters = types.SamplingParams(max_tokens=16, temperature=0.0, stop=[])
    sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 4, parameters).result()
    after_sampling = len(done)
    thread.join(600)
    assert len(done) == len(pending)
    # Eleven turns of the second model, each with one turn of the first; two more for what was in flight.
    assert after_training <= 2 * 13, f"{after_training} of {len(pending)} works were done before"
    assert after_sampling - after_training <= 12, (after_training, after_sampling)


def test_on_a_gpu_models_that_wait_are_in_host_memory(program, models, tmp_path):
    """On the emulated device (docs/cuda_emulation.md), with memory for one of three models."""
    emulated = program.parents[1] / "cuda_emulation" / "bough"
    environment = {"BOUGH_EMULATED_CUDA": "1", "BOUGH_EMULATED_MEMORY": "2000000000"}
    settings = ["--device", "cuda", "--dtype", "fp32", "memory=64MiB", "rollout.kv_memory=16MiB"]
    results = []
    for number, memory in enumerate(("100000", "10MiB")):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Service(
            emulated, models("qwen3"), folder, *settings, f"model_memory={memory}", env=environment
        ) as service:
            clients = [service.train(rank=2, seed=seed) for seed in range(3)]
            for client in clients:
                client.forward_backward(batches(1)[0], "cross_entropy").result()
            for client in clients:
                client.optim_step(STEP).result()
                client.forward_backward(batches(2)[1], "cross_entropy").result()
            for client in clients:
                client.optim_step(STEP).result()
            assert num_parked(service) == 0
            results.append([service.weights(client) for client in clients])
    for waited, stayed in zip(*results, strict=True):
        assert_same(waited, stayed)
