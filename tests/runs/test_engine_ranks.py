"""Ranks that only generate (`rollout.ranks`)."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from ranks_util import (
    ENVIRONMENT,
    LAUNCHERS,
    REWARD,
    children,
    kill_and_see_all_end,
    largest_difference,
    ranks_of,
    see_all_end,
    start,
    wait_for_checkpoint,
)
from run_util import final_state, last_checkpoint, read_metrics
from safetensors.numpy import load_file


def base_bytes(experiment):
    """Bytes of the trained weights in fp32, the dtype of the computation."""
    base = load_file(experiment.folder("any").parents[2] / "base" / "model.safetensors")
    return sum(4 * tensor.size for tensor in base.values())


def test_ranks_that_only_generate_and_only_train(experiment):
    """Counts and weights equal those of one process. A publication has the bytes of the weights."""
    words = ("valid_dataset.path=valid.jsonl",)
    experiment("one", *words)
    for ranks, engines in ((2, 1), (3, 1), (4, 2)):
        trial = f"of{ranks}with{engines}"
        experiment(trial, "--ranks", ranks, f"rollout.ranks={engines}", *words)
        assert largest_difference(experiment.folder("one"), experiment.folder(trial)) < 1e-5
        one, records = (read_metrics(experiment.folder(name)) for name in ("one", trial))
        for name in ("rollout/new_tokens", "reward/mean", "eval/avg_at_k", "staleness/max"):
            assert [r.get(name) for r in records] == [r.get(name) for r in one], name
        steps = [record for record in records if record["step"] > 0]
        # A step's own publication comes after its record, so the record has the previous publication.
        assert all(record["publication/bytes"] == base_bytes(experiment) for record in steps)
        assert all(
            record["publication/seconds"] > 0 < record["publication/stall_seconds"] for record in steps
        )
        assert all(record["rollout/engine_restarts"] == 0 for record in steps)
        # Two trainers share each step. A single trainer computes the step alone.
        assert all(("ranks/slowest_over_mean" in record) == (ranks - engines > 1) for record in steps)


def test_weights_are_published_while_others_generate(experiment):
    words = ("rollout.max_head_offpolicyness=2", "total_train_steps=12", "--ranks", 3, "rollout.ranks=1")
    experiment("beside", *words)
    records = read_metrics(experiment.folder("beside"))
    assert [record["step"] for record in records] == list(range(1, 13))
    assert all(record["staleness/max"] <= 2 for record in records)
    published = sum(record.get("publication/bytes", 0) for record in records)
    # No record has the last step's publication, or a publication that a newer one replaced before it arrived.
    assert base_bytes(experiment) <= published <= 12 * base_bytes(experiment)
    assert published % base_bytes(experiment) == 0
    # A token that was sampled by other weights than its version says would have a large mismatch.
    assert all(record["mismatch/logprob_abs_diff"] < 0.1 for record in records)


def test_adapters_alone_are_published(experiment):
    words = ("lora.rank=4", "total_train_steps=3")
    experiment("one", *words)
    experiment("two", *words, "--ranks", 2, "rollout.ranks=1")
    one, two = (
        load_file(last_checkpoint(experiment.folder(trial)) / "adapter" / "adapter_model.safetensors")
        for trial in ("one", "two")
    )
    assert max(float(abs(one[name] - two[name]).max()) for name in one) < 1e-5
    sent = read_metrics(experiment.folder("two"))[-1]["publication/bytes"]
    assert sent == sum(4 * tensor.size for tensor in two.values())


def test_a_killed_run_with_engine_ranks_goes_on(bough, experiment):
    """The engine rank or trainer 0 is killed. At last the run continues with another split of ranks."""
    words = ("total_train_steps=12", "--ranks", 3, "rollout.ranks=1")
    experiment("whole", *words)
    for killed in (0, 2):
        trial = f"killed{killed}"
        process = start(bough, "train", "config.yaml", f"trial_name={trial}", *words)
        ranks = ranks_of(process, 3)
        wait_for_checkpoint(experiment.folder(trial))
        engine = engine_of(ranks[2])
        kill_and_see_all_end(process, ranks, killed)
        see_all_end([engine], time.monotonic())
    experiment("killed2", *words)
    assert final_state(experiment.folder("killed2")) == final_state(experiment.folder("whole"))
    said = experiment("killed0", "--ranks", 2, "total_train_steps=12")
    assert "on 3 ranks (1 generating), and continues with 1 on 2:" in said.stderr
    assert len(read_metrics(experiment.folder("killed0"))) == 12


def wait_for_another_step(run):
    before, deadline = len(read_metrics(run)), time.monotonic() + 120
    while len(read_metrics(run)) == before:
        assert time.monotonic() < deadline, "no step"
        time.sleep(0.02)


def engine_of(rank):
    """Returns the process of a rank's engine, which is a child of the process that keeps it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for keeper in children(rank):
            for process in children(keeper):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                    if words[1:2] == [b"engine-process"]:
                        return process
        time.sleep(0.02)
    pytest.fail("no process of an engine")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_engines_that_die_cost_their_requests_a_retry(bough, experiment, launcher):
    """An engine may die at any moment. The run ends like a run whose engine lives, with the same samples, bit
    for bit."""
    num_kills, num_steps = (50, 500) if os.environ.get("BOUGH_SLOW") else (3, 30)
    slower = "import time\n" + REWARD.replace("return", "time.sleep(0.02)\n    return")
    (bough.cwd / "letters.py").write_text(slower)
    words = (f"total_train_steps={num_steps}", "--ranks", 3, "rollout.ranks=1", "--launcher", launcher)
    experiment("whole", *words)
    process = start(bough, "train", "config.yaml", "trial_name=killed", *words)
    ranks = ranks_of(process, 3, launcher)
    wait_for_checkpoint(experiment.folder("killed"))
    killed = set()
    while len(killed) < num_kills:
        engine = engine_of(ranks[2])
        assert engine not in killed
        killed.add(engine)
        os.kill(engine, signal.SIGKILL)
        time.sleep(random.uniform(0, 1.5))  # while another engine begins, or after that
        # A fourth engine in a row that dies before it finishes anything ends the run.
        if len(killed) % 3 == 0 and len(killed) < num_kills:
            wait_for_another_step(experiment.folder("killed"))
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    see_all_end(ranks, time.monotonic())
    assert final_state(experiment.folder("killed")) == final_state(experiment.folder("whole"))
    restarts = read_metrics(experiment.folder("killed"))[-1]["rollout/engine_restarts"]
    assert restarts == len(killed)
    assert "engine rank 1 of 1: the engine process was killed by signal 9 (Killed)" in said


def test_an_asynchronous_run_with_engine_ranks_is_interrupted_and_goes_on(bough, experiment):
    words = ("rollout.max_head_offpolicyness=2", "--ranks", 2, "rollout.ranks=1")
    process = start(bough, "train", "config.yaml", "total_train_steps=1000", *words)
    ranks = ranks_of(process, 2)
    wait_for_checkpoint(experiment.folder("trial0"))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    see_all_end(ranks, time.monotonic())
    step = int(said.split("stopped after step ")[1].split()[0])
    experiment("trial0", f"total_train_steps={step + 3}", *words)
    assert read_metrics(experiment.folder("trial0"))[-1]["step"] == step + 3


def test_a_split_that_leaves_nobody_to_train_is_refused(bough, experiment):
    for words, said in (
        (["rollout.ranks=2", "--ranks", 2], "rollout.ranks: got 2 of 2 processes"),
        (["rollout.ranks=1"], "rollout.ranks: got 1 of 1 process"),
        (["rollout.ranks=1", "--ranks", 2, "rollout.backend=vllm"], "rollout.ranks is 1"),
    ):
        refused = bough("train", "config.yaml", *words, env=ENVIRONMENT)
        assert refused.returncode == 2, refused.stderr
        assert said in refused.stderr
