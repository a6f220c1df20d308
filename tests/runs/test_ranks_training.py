"""Runs of several processes, `--ranks N`: their weights, their ends, and checkpoints that others continue."""

import math
import os
import random
import signal
import socket
import subprocess
import time

import pytest
from host_env import is_batch_invariant
from ranks_util import (
    ENVIRONMENT,
    LAUNCHERS,
    UNDER_SRUN,
    kill_and_see_all_end,
    largest_difference,
    ranks_of,
    samples_of,
    see_all_end,
    start,
    torchrun,
    torchrun_command,
    wait_for_checkpoint,
    weights_of,
)
from run_util import comparable_metrics, final_state, last_checkpoint, read_metrics
from safetensors.numpy import load_file
from test_sparse import DISTILL, DRAFT, SPARSE, init_draft


def test_ranks_train_as_one_process_does(experiment):
    experiment("one")
    base = load_file(experiment.folder("one").parents[2] / "base" / "model.safetensors")
    moved = weights_of(experiment.folder("one"))
    assert max(float(abs(base[name] - moved[name]).max()) for name in base) > 1e-3
    for ranks in (2, 3):
        trial = f"of{ranks}"
        experiment(trial, "--ranks", ranks)
        assert largest_difference(experiment.folder("one"), experiment.folder(trial)) < 1e-5
        records = read_metrics(experiment.folder(trial))
        assert all(record["ranks/slowest_over_mean"] >= 1 for record in records if record["step"] > 0)


@pytest.mark.parametrize("ended, how", [(2, signal.SIGKILL), (2, signal.SIGSTOP), (0, signal.SIGSTOP)])
def test_ranks_without_a_launcher_connect_and_detect_dead_ranks(bough, experiment, ended, how):
    """The ranks are started one by one. Rank 0 holds the store. A rank that has died or stopped is detected
    by its silence."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), **ENVIRONMENT}
    ranks = [
        subprocess.Popen(
            [str(bough.program), "train", "config.yaml", "total_train_steps=100000"],
            cwd=bough.cwd,
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    wait_for_checkpoint(experiment.folder("trial0"))
    ranks[ended].send_signal(how)
    begin = time.monotonic()
    for rank in ranks:
        if rank is ranks[ended]:
            continue
        said = rank.communicate(timeout=30)[1]
        assert rank.returncode == 3
        assert "has said nothing" in said or "has failed" in said or "has died" in said, said
        assert "frame #" not in said
    assert time.monotonic() - begin < 11
    ranks[ended].kill()
    ranks[ended].communicate()


# Ranks that share each layer have no unsharded model to generate with. Another rank generates.
@pytest.mark.parametrize("words", ["actor.backend=fsdp:c2", "actor.backend=fsdp:d2t2 rollout.ranks=1"])
def test_ranks_that_share_passes_train_as_one_process_does(experiment, words):
    experiment("one")
    experiment("shared", *words.split())
    assert largest_difference(experiment.folder("one"), experiment.folder("shared")) < 1e-5
    of_one, of_shared = (read_metrics(experiment.folder(trial)) for trial in ("one", "shared"))
    for one, shared in zip(of_one, of_shared, strict=True):
        assert math.isclose(one["optim/grad_norm"], shared["optim/grad_norm"], rel_tol=1e-3)
        assert one["reward/mean"] == shared["reward/mean"]


def test_ranks_that_share_passes_are_killed_and_go_on_as_others(bough, experiment):
    words = ["total_train_steps=12", "actor.kl_loss_coef=0.01", "lora.rank=4"]
    experiment("whole", *words)
    shared = [*words, "actor.backend=fsdp:c2t2", "rollout.ranks=1"]
    process = start(bough, "train", "config.yaml", "trial_name=killed", *shared)
    ranks = ranks_of(process, 5)
    wait_for_checkpoint(experiment.folder("killed"))
    kill_and_see_all_end(process, ranks, killed=2)
    experiment("killed", *words, "actor.backend=fsdp:t2", "rollout.ranks=1", "total_train_steps=9")
    assert len(read_metrics(experiment.folder("killed"))) == 9
    experiment("killed", *words)
    assert len(read_metrics(experiment.folder("killed"))) == 12
    adapters = [
        load_file(last_checkpoint(experiment.folder(trial)) / "adapter" / "adapter_model.safetensors")
        for trial in ("whole", "killed")
    ]
    assert max(float(abs(adapters[0][name] - adapters[1][name]).max()) for name in adapters[0]) < 1e-4


def run_whole_and_killed(bough, experiment, words, later):
    """`whole` is a run of one process. `killed` begins as a pipeline, is killed, and continues with t2, with
    `later`, and alone."""
    words = [*words, "total_train_steps=12"]
    experiment("whole", *words)
    process = start(
        bough, "train", "config.yaml", "trial_name=killed", *words, "actor.backend=fsdp:p2", "rollout.ranks=1"
    )
    ranks = ranks_of(process, 3)
    wait_for_checkpoint(experiment.folder("killed"))
    kill_and_see_all_end(process, ranks, killed=1)
    experiment("killed", *words, "actor.backend=fsdp:t2", "rollout.ranks=1", "total_train_steps=8")
    experiment("killed", *words, f"actor.backend={later}", "rollout.ranks=1", "total_train_steps=10")
    experiment("killed", *words)
    assert len(read_metrics(experiment.folder("killed"))) == 12


def test_a_pipeline_is_killed_and_goes_on_as_others(bough, experiment):
    run_whole_and_killed(bough, experiment, ["actor.kl_loss_coef=0.01"], later="fsdp:d2p2")
    assert largest_difference(experiment.folder("whole"), experiment.folder("killed")) < 1e-4


@pytest.mark.parametrize("backend", ["fsdp:t2", "fsdp:p2"])
def test_ranks_that_share_layers_need_ranks_that_generate(bough, experiment, backend):
    said = bough("train", "config.yaml", f"actor.backend={backend}", env=ENVIRONMENT)
    assert said.returncode == 2
    assert "rollout.ranks above 0" in said.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_run_of_ranks_goes_on_and_with_others_too(bough, experiment, launcher):
    experiment("whole", "--ranks", 2, "total_train_steps=12")
    for killed in (0, 1):
        trial = f"killed{killed}"
        words = ("train", "config.yaml", f"trial_name={trial}", "total_train_steps=12", "--ranks", 2)
        process = start(bough, *words, "--launcher", launcher)
        ranks = ranks_of(process, 2, launcher)
        wait_for_checkpoint(experiment.folder(trial))
        kill_and_see_all_end(process, ranks, killed)
        assert read_metrics(experiment.folder(trial))[-1]["step"] < 12
    experiment("killed0", "--ranks", 2, "total_train_steps=12")
    assert final_state(experiment.folder("killed0")) == final_state(experiment.folder("whole"))
    said = experiment("killed1", "--ranks", 3, "total_train_steps=12")
    assert "on 2 ranks, and continues with 1 on 3" in said.stderr
    assert len(read_metrics(experiment.folder("killed1"))) == 12


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_whose_rank_died_is_started_again(bough, experiment, launcher):
    experiment("whole", "--ranks", 2, "total_train_steps=12")
    words = ("train", "config.yaml", "trial_name=again", "total_train_steps=12", "--ranks", 2)
    words += ("--launcher", launcher)
    process = start(bough, *words, "--max-restarts", 1)
    ranks = ranks_of(process, 2, launcher)
    wait_for_checkpoint(experiment.folder("again"))
    os.kill(ranks[1], signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "a rank was ended by signal 9" in said and "restart 1 of 1" in said
    assert final_state(experiment.folder("again")) == final_state(experiment.folder("whole"))
    # Wrong input does not cause a restart.
    wrong = bough(*words, "--max-restarts", 3, "model.path=nowhere", env=ENVIRONMENT)
    assert wrong.returncode == 2 and "restart" not in wrong.stderr
    alone = bough("train", "config.yaml", "--max-restarts", 3)
    assert alone.returncode == 2 and "--max-restarts" in alone.stderr


@pytest.mark.skipif(not os.environ.get("BOUGH_SLOW"), reason="fifty starts: in the slow suite")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_fifty_kills_at_random_moments(bough, experiment, launcher):
    """Any rank is killed at any moment. All ranks end, and the next start continues. No step or sample is
    lost or repeated."""
    draw = random.Random(7)
    words = ["trial_name=killed", "saver.freq_steps=2", "saver.rollouts=true"]
    words += ["--ranks", 3, "--launcher", launcher]
    words += ["actor.optimizer.warmup_steps_proportion=0"]  # steps do not depend on the total number
    for _ in range(int(os.environ.get("BOUGH_KILLS", "50"))):
        process = start(bough, "train", "config.yaml", *words, "total_train_steps=100000")
        ranks = ranks_of(process, 3, launcher)
        time.sleep(draw.uniform(0, 4))
        kill_and_see_all_end(process, ranks, draw.randrange(3))
    # Two more kills, during one command that restarts its ranks.
    num_steps = 100 + max(r["step"] for r in read_metrics(experiment.folder("killed")))
    words.append(f"total_train_steps={num_steps}")
    process = start(bough, "train", "config.yaml", *words, "--max-restarts", 2)
    for _ in range(2):
        ranks = ranks_of(process, 3, launcher)
        time.sleep(draw.uniform(0, 2))
        os.kill(ranks[draw.randrange(3)], signal.SIGKILL)
        see_all_end(ranks, time.monotonic())
    assert process.wait(timeout=600) == 0
    folder = experiment.folder("killed")
    steps = [record["step"] for record in read_metrics(folder) if record["step"] > 0]
    assert steps == list(range(1, num_steps + 1))
    experiment("whole", *words[1:])
    whole = experiment.folder("whole")
    assert final_state(folder) == final_state(whole)
    # Each step was trained on the same samples as in a run without kills.
    for step in range(1, num_steps + 1):
        assert samples_of(folder, step) == samples_of(whole, step), step


def test_a_worker_of_torchrun_dies_and_the_run_goes_on(bough, experiment):
    experiment("whole", "--ranks", 2, "total_train_steps=12")
    words = ("train", "config.yaml", "trial_name=killed", "total_train_steps=12")
    process = subprocess.Popen(
        torchrun_command(bough, *words, ranks=2),
        cwd=bough.cwd,
        env={**os.environ, **ENVIRONMENT, **UNDER_SRUN},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ranks = ranks_of(process, 2, "torchrun")
    wait_for_checkpoint(experiment.folder("killed"))
    begin = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    see_all_end(ranks, begin)
    assert process.wait(timeout=60) != 0
    assert read_metrics(experiment.folder("killed"))[-1]["step"] < 12
    assert torchrun(bough, *words, ranks=2, timeout=300).returncode == 0
    assert final_state(experiment.folder("killed")) == final_state(experiment.folder("whole"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_writes_a_checkpoint(bough, experiment, launcher):
    words = ("total_train_steps=1000", "--ranks", 2, "--launcher", launcher)
    process = start(bough, "train", "config.yaml", *words)
    ranks = ranks_of(process, 2, launcher)
    wait_for_checkpoint(experiment.folder("trial0"))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped after step" in said
    see_all_end(ranks, time.monotonic())


@pytest.mark.parametrize(
    "words", [["lora.rank=4"], ["actor.kl_loss_coef=0.1"], ["rollout.max_head_offpolicyness=2"]]
)
def test_ranks_train_adapters_and_beside_generation(experiment, words):
    experiment("one", *words)
    experiment("two", *words, "--ranks", 2)
    if "lora.rank=4" in words:
        one, two = (
            load_file(last_checkpoint(experiment.folder(trial)) / "adapter" / "adapter_model.safetensors")
            for trial in ("one", "two")
        )
        assert max(float(abs(one[name] - two[name]).max()) for name in one) < 1e-5


# Ranks with data shards, and ranks that share layers or passes. Other ranks continue from the checkpoint.
@pytest.mark.parametrize(
    "words, later",
    [
        (["--ranks", 2], ["--ranks", 3]),
        (["actor.backend=fsdp:d2t2", "rollout.ranks=1"], ["actor.backend=fsdp:t2", "rollout.ranks=1"]),
        (["actor.backend=fsdp:c2"], ["--ranks", 2]),
        (["actor.backend=fsdp:p2", "rollout.ranks=1"], ["actor.backend=fsdp:d2p2", "rollout.ranks=1"]),
    ],
)
@pytest.mark.parametrize("shares", ["true", "false"])
def test_ranks_train_a_critic(experiment, shares, words, later):
    """The critic's values before the update, and its steps, equal those of one process. Other ranks continue
    from its checkpoint."""
    critic = ("actor.adv_estimator=gae", f"critic.share_backbone={shares}", "critic.warmup_steps=1")
    critic += ("actor.gae_lambda=0.9", "actor.ppo_n_minibatches=2", "critic.optimizer.lr=0.01")
    experiment("one", *critic)
    experiment("two", *critic, *words, "total_train_steps=4")
    experiment("two", *critic, *later)
    assert largest_difference(experiment.folder("one"), experiment.folder("two")) < 1e-5
    heads = [
        load_file(last_checkpoint(experiment.folder(trial)) / "critic" / "value_head.safetensors")
        for trial in ("one", "two")
    ]
    assert all(float(abs(heads[0][name] - heads[1][name]).max()) < 1e-5 for name in heads[0])
    assert float(abs(heads[0]["score.weight"]).max()) > 1e-3
    one, two = (read_metrics(experiment.folder(trial)) for trial in ("one", "two"))
    for name in ("critic/loss", "critic/value_mean", "critic/explained_variance"):
        assert [r.get(name) for r in two] == pytest.approx([r.get(name) for r in one], abs=1e-4), name


@pytest.mark.parametrize("shares", ["true", "false"])
def test_a_pipelines_critic_is_killed_and_goes_on_as_others(bough, experiment, shares):
    words = ["actor.adv_estimator=gae", f"critic.share_backbone={shares}"]
    run_whole_and_killed(bough, experiment, words, later="fsdp:p2")
    whole, killed = experiment.folder("whole"), experiment.folder("killed")
    # Weights differ in their last bits, so the choice between two tokens may differ. Steps are compared up to
    # the first difference, which must come after the first change of ranks.
    drawn = [
        [[row["input_ids"] for row in samples_of(run, step)] for step in range(1, 13)]
        for run in (whole, killed)
    ]
    alike = next((k for k in range(12) if drawn[0][k] != drawn[1][k]), 12)
    assert alike >= 4
    for a, b in zip(read_metrics(whole)[:alike], read_metrics(killed)[:alike], strict=True):
        for name in ("critic/loss", "critic/value_mean", "critic/grad_norm", "optim/grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), (a["step"], name)
    if alike == 12:
        assert largest_difference(whole, killed) < 1e-4


def test_ranks_choose_samples_by_acceptance(experiment):
    """The samples come from sparse attention. Dense samples would all be accepted alike, up to rounding."""
    sparse = [f"{key}={str(value).lower()}" for key, value in SPARSE.items()]
    words = (*sparse, "actor.keep_samples=2", "actor.keep_samples_by=acceptance", "gconfig.n_samples=4")
    experiment("one", *words)
    experiment("two", *words, "--ranks", 2)
    assert largest_difference(experiment.folder("one"), experiment.folder("two")) < 1e-5


def test_allocations_in_areals_syntax_set_the_ranks(bough, experiment):
    experiment("named", "allocation_mode=fsdp:d2", "total_train_steps=1")
    record = read_metrics(experiment.folder("named"))[-1]
    assert record["step"] == 1 and record["ranks/bytes_sent"] > 0
    experiment("split", "allocation_mode=embedded:d1+fsdp:d2", "total_train_steps=2")
    record = read_metrics(experiment.folder("split"))[-1]
    assert record["publication/bytes"] > 0 and "ranks/slowest_over_mean" in record
    for word, said in (
        ("allocation_mode=embedded:d1t2+fsdp:d2", "expected embedded:dN"),
        ("allocation_mode=sglang:d1+fsdp:d2e2", "e2 is not supported"),
        ("allocation_mode=sglang:d4|fsdp:d4", "SERVERS+TRAINER"),
        ("actor.backend=deepspeed:d2", "unknown trainer 'deepspeed'"),
        ("actor.backend=fsdp:two", "expected fsdp:dN"),
        ("allocation_mode=sglang:d1+fsdp:d2", "rollout.servers.addresses"),
    ):
        refused = bough("train", "config.yaml", word, env=ENVIRONMENT)
        assert refused.returncode == 2 and said in refused.stderr, (word, refused.stderr)
    twice = bough("train", "config.yaml", "actor.backend=fsdp:d2", "--ranks", 3)
    assert twice.returncode == 2 and "leave one of them out" in twice.stderr


def test_unsupported_settings_of_ranks_are_refused(bough, experiment):
    sparse = ("rollout.sparse.budget=64", "gconfig.top_logprobs=20", "actor.backend=fsdp:c2")
    for words, said in (
        ((*sparse, "sparse_training.mode=distill"), "trains with chosen blocks"),
        ((*sparse, "sparse_training.arm=sparse_to_sparse"), "trains with chosen blocks"),  # old key
        (("actor.backend=fsdp:t2", "rollout.ranks=1", "rollout.batch_invariant=true"), "another order"),
        (("actor.backend=fsdp:t2", "rollout.ranks=1", "actor.deterministic=true"), "another order"),
        (("actor.backend=fsdp:p2", "rollout.ranks=1", "actor.deterministic=true"), "another order"),
    ):
        refused = bough("train", "config.yaml", *words, env=ENVIRONMENT)
        assert refused.returncode == 2 and said in refused.stderr, (words, refused.stderr)


@pytest.mark.parametrize("backend", ["fsdp:t2", "fsdp:p2"])
def test_a_reference_of_shared_layers_is_renewed(experiment, backend):
    words = ("actor.kl_loss_coef=0.1", "actor.ref_model_sync_steps=2", "actor.ref_model_mixup_alpha=0.5")
    experiment("one", *words)
    experiment("two", *words, f"actor.backend={backend}", "rollout.ranks=1", "total_train_steps=4")
    experiment("two", *words, f"actor.backend={backend}", "rollout.ranks=1")
    assert largest_difference(experiment.folder("one"), experiment.folder("two")) < 1e-5
    one, two = (
        load_file(last_checkpoint(experiment.folder(trial)) / "reference" / "model.safetensors")
        for trial in ("one", "two")
    )
    assert one.keys() == two.keys()
    assert max(float(abs(one[name] - two[name]).max()) for name in one) < 1e-5


# ---- A policy that generates, beside the trained policy.


def trained_weights(run, mode):
    folder = {"distill": "sparse_adapter/adapter_model", "draft": "weak/model/model"}[mode]
    return load_file(last_checkpoint(run) / f"{folder}.safetensors")


@pytest.mark.parametrize("words", ["--ranks 2", "--ranks 2 rollout.ranks=1", "--ranks 4 rollout.ranks=2"])
@pytest.mark.parametrize("mode", ["distill", "draft"])
def test_ranks_train_the_policy_that_generates(bough, experiment, mode, words):
    """Metrics, samples and both policies' weights equal those of one process. Any number of ranks continues
    from a checkpoint."""
    init_draft(bough)
    chosen = {
        **(DISTILL if mode == "distill" else DRAFT),
        "gconfig.max_new_tokens": 80 if mode == "distill" else 24,
    }
    settings = [f"{key}={str(value).lower()}" for key, value in chosen.items()]
    experiment("one", *settings)
    experiment("two", *settings, *words.split(), "total_train_steps=4")
    experiment("two", *settings, "--ranks", 3)
    one, two = experiment.folder("one"), experiment.folder("two")
    assert largest_difference(one, two) < 1e-4
    own, other = trained_weights(one, mode), trained_weights(two, mode)
    assert max(float(abs(own[name] - other[name]).max()) for name in own) < 1e-4
    assert max(float(abs(own[name]).max()) for name in own) > 1e-3
    for a, b in zip(comparable_metrics(one), comparable_metrics(two), strict=True):
        for name in a:
            if name.startswith(("sparse/", "loss/", "reward/", "rollout/new", "optim/", "policy/")):
                assert b[name] == pytest.approx(a[name], rel=2e-3, abs=1e-4), (a["step"], name)


def test_ranks_replay_the_pages_that_generation_chose(bough, experiment):
    settings = [f"{key}={str(value).lower()}" for key, value in DISTILL.items()]
    words = ["rollout.sparse.replay=true", "total_train_steps=3", "gconfig.max_new_tokens=80"]
    experiment("one", *settings, *words)
    experiment("two", *settings, *words, "--ranks", 2)
    one, two = (read_metrics(experiment.folder(trial)) for trial in ("one", "two"))
    assert all(record["sparse/replayed"] > 0.9 for record in one)
    assert [r["sparse/replayed"] for r in two] == pytest.approx([r["sparse/replayed"] for r in one])


def test_deterministic_training_gives_the_same_bits_on_any_number_of_ranks(bough, experiment):
    words = ("actor.deterministic=true", "calibration=calibration.json", "total_train_steps=3")
    bough("bench", "profile", "--out", "calibration.json", ok=True, env=ENVIRONMENT)
    experiment("one", *words)
    experiment("four", *words, "--ranks", 4)
    # Training gives the same bits. The batch is generated in other passes, so its bits are the same only if
    # generation is batch-invariant.
    most = 0 if is_batch_invariant() else 1e-6
    assert largest_difference(experiment.folder("one"), experiment.folder("four")) <= most
    # A run of four ranks is killed and continues on two.
    process = start(bough, "train", "config.yaml", "trial_name=two", *words, "--ranks", 4)
    ranks = ranks_of(process, 4)
    wait_for_checkpoint(experiment.folder("two"))
    kill_and_see_all_end(process, ranks, killed=2)
    experiment("two", *words, "--ranks", 2)
    assert largest_difference(experiment.folder("one"), experiment.folder("two")) <= most
    refused = bough("train", "config.yaml", *words, "--ranks", 3, env=ENVIRONMENT)
    assert refused.returncode == 2
    assert "expected 1, 2, 4 or 8" in refused.stderr
