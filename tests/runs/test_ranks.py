"""`--ranks N`: several processes compute the gradient of a step, or of a whole run, together. Open MPI starts
the processes, or the command itself does."""

import contextlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from host_env import is_batch_invariant
from run_util import ENVIRONMENT as OF_RUNS
from run_util import (
    comparable_metrics,
    final_state,
    last_checkpoint,
    read_metrics,
    read_rollouts,
    write_experiment,
)
from safetensors.numpy import load_file
from test_sparse import DISTILL, DRAFT, SPARSE, init_draft

LAUNCHERS = ["mpirun", "processes"]
# torch's store looks up the name of each address. If no name server answers, the lookup takes as long as
# these options say.
ENVIRONMENT = {**OF_RUNS, "RES_OPTIONS": "timeout:1 attempts:1"}
WORKLOAD = Path(__file__).resolve().parents[2] / "bench/workload.py"


@pytest.fixture
def step(bough):
    """A model, an agentic rollout set, and the arguments of `bough step` for them."""
    bough("init", "model", "--hidden-size", 32, "--layers", 2, "--vocab-size", 300, ok=True)
    shape = [
        "--shape",
        "agentic",
        "--n",
        "4",
        "--plen",
        "30",
        "--turns",
        "3",
        "--rlen",
        "12",
        "--prompts",
        "2",
    ]
    command = [sys.executable, WORKLOAD, *shape, "--vocab", "300", "--out", bough.cwd / "rollouts.jsonl"]
    subprocess.run(command, check=True, capture_output=True)
    return ["step", "--model", "model", "--rollouts", "rollouts.jsonl", "--dtype", "fp64"]


def result_of(bough, *words):
    return json.loads(bough(*words, "--json", ok=True, env=ENVIRONMENT).stdout.splitlines()[-1])


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("loss", ["ppo", "gspo"])  # the ratio of gspo is computed for a sequence
def test_ranks_have_the_gradient_of_one(bough, step, loss, launcher):
    alone = result_of(bough, *step, f"actor.loss={loss}")
    for ranks in (2, 3):
        together = result_of(bough, *step, f"actor.loss={loss}", "--ranks", ranks, "--launcher", launcher)
        assert together["ranks"] == ranks
        assert together["trained_tokens"] == alone["trained_tokens"]
        for name in ("loss", "grad_norm"):
            assert math.isclose(together[name], alone[name], rel_tol=1e-10), name


def num_gpus():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("backend", ["fsdp:p2", "fsdp:d2p2"])
def test_stages_have_the_gradient_of_one(bough, step, backend, launcher):
    alone = result_of(bough, *step)
    together = result_of(bough, *step, f"actor.backend={backend}", "--launcher", launcher)
    assert together["ranks"] == (4 if "d2" in backend else 2)
    for name in ("loss", "grad_norm"):
        assert math.isclose(together[name], alone[name], rel_tol=1e-10), name


@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:t2", "fsdp:c2", "fsdp:p2"])
def test_gpus_have_the_gradient_of_one(bough, step, backend):
    try:
        count = num_gpus()
    except FileNotFoundError:
        count = 0
    if count < 2:
        pytest.skip("needs two GPUs")
    words = [word if word != "fp64" else "fp32" for word in step]
    alone = result_of(bough, *words, "--device", "cuda")
    together = result_of(bough, *words, "--device", "cuda", f"actor.backend={backend}")
    for name in ("loss", "grad_norm"):
        assert math.isclose(together[name], alone[name], rel_tol=1e-4), name


# The variables that srun sets for torchrun, and that torchrun's workers find.
UNDER_SRUN = {"PMIX_RANK": "0", "SLURM_LOCALID": "0"}


def torchrun_command(bough, *words, ranks):
    program = Path(sys.executable).parent / "torchrun"
    command = [program, "--nproc-per-node", ranks, "--standalone", "--no-python", bough.program, *words]
    return list(map(str, command))


def torchrun(bough, *words, ranks, **more):
    return subprocess.run(
        torchrun_command(bough, *words, ranks=ranks),
        cwd=bough.cwd,
        env={**os.environ, **ENVIRONMENT, **UNDER_SRUN},
        capture_output=True,
        text=True,
        check=False,
        **more,
    )


def test_torchrun_starts_ranks(bough, step):
    alone = result_of(bough, *step)
    said = torchrun(bough, *step, "--json", ranks=2, timeout=120)
    assert said.returncode == 0, said.stderr
    together = json.loads(said.stdout.splitlines()[-1])
    assert together["ranks"] == 2
    assert math.isclose(together["grad_norm"], alone["grad_norm"], rel_tol=1e-10)


def test_failed_connections_of_ranks_name_the_cause(bough, step):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        variables = {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        said = bough(*step, env={**variables, "MASTER_PORT": port})
        assert said.returncode == 2 and "a port that is free there" in said.stderr, said.stderr
        said = bough(*step, env=variables)
        assert said.returncode == 2 and "MASTER_PORT: not set" in said.stderr, said.stderr


def test_ranks_start_where_there_is_no_mpirun(bough, step):
    said = bough(*step, "--ranks", 2, ok=True, env={**ENVIRONMENT, "PATH": "/nowhere"})
    assert said.stdout.count("gradient norm") == 1
    asked = bough(*step, "--ranks", 2, "--launcher", "mpirun", env={**ENVIRONMENT, "PATH": "/nowhere"})
    assert asked.returncode == 2 and "use --launcher processes" in asked.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_only_one_rank_prints_and_every_rank_says_what_is_wrong(bough, step, launcher):
    words = ("--ranks", 2, "--launcher", launcher)
    said = bough(*step, *words, ok=True, env=ENVIRONMENT)
    assert said.stdout.count("gradient norm") == 1
    missing = bough("step", "--model", "nowhere", "--rollouts", "rollouts.jsonl", *words, env=ENVIRONMENT)
    assert missing.returncode == 2
    assert "rank 0: bough step: nowhere" in missing.stderr
    wrong = bough(*step, "--ranks", 0)
    assert wrong.returncode == 2
    assert "expected 1 to" in wrong.stderr
    other = bough(*step, "--ranks", 2, "--launcher", "slurm")
    assert other.returncode == 2
    assert "expected auto, mpirun or processes" in other.stderr
    alone = bough(*step, "--launcher", "processes")
    assert alone.returncode == 2
    assert "without --ranks" in alone.stderr


def start(bough, *words):
    return subprocess.Popen(
        [str(bough.program), *map(str, words)],
        cwd=bough.cwd,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def ranks_of(process, count, launcher="mpirun"):
    """Returns the processes that mpirun, or the command itself, has started."""
    deadline = time.monotonic() + 60
    ranks = []
    while len(ranks) < count and time.monotonic() < deadline:
        time.sleep(0.05)
        ranks = children(process.pid)
        if launcher == "mpirun":
            ranks = [rank for started in ranks for rank in children(started)]
    assert len(ranks) == count, "the ranks have not been started"
    return sorted(ranks)


def kill_and_see_all_end(process, ranks, killed):
    os.kill(ranks[killed], signal.SIGKILL)
    begin = time.monotonic()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "a rank was ended by signal 9" in said
    see_all_end(ranks, begin)


def see_all_end(ranks, begin):
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() - begin < 10:
        time.sleep(0.1)
    assert time.monotonic() - begin < 10, "another rank goes on"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_dies_ends_all(bough, step, launcher):
    process = start(bough, *step, "--ranks", 2, "--repeat", 1000000, "--launcher", launcher)
    ranks = ranks_of(process, 2, launcher)
    time.sleep(2)
    kill_and_see_all_end(process, ranks, killed=1)


REWARD = """
def reward(prompt, completion, **rest):
    return sum(map(ord, completion)) % 7 / 7
"""


@pytest.fixture
def experiment(bough):
    """A run in which samples of a prompt differ in their rewards from the first step on."""
    (bough.cwd / "letters.py").write_text(REWARD)
    settings = {"reward": "letters.py:reward", "valid_dataset.path": "", "total_train_steps": 6}

    def run(trial, *words, **more):
        return bough("train", "config.yaml", f"trial_name={trial}", *words, ok=True, env=ENVIRONMENT, **more)

    write_experiment(bough, **settings)
    run.folder = lambda trial: bough.cwd / "runs" / "tiny" / trial
    return run


def weights_of(run):
    return load_file(last_checkpoint(run) / "model" / "model.safetensors")


def largest_difference(run, other):
    a, b = weights_of(run), weights_of(other)
    return max(float(abs(a[name] - b[name]).max()) for name in a)


def wait_for_checkpoint(run):
    deadline = time.monotonic() + 300  # ranks that share busy cores wait for each other
    while not (run / "latest").exists():
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)


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


def samples_of(folder, step):
    return read_rollouts(folder / f"rollouts/step_{step}.jsonl.zst")


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


# ---- Ranks that only generate.


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
