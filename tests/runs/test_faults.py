"""One asynchronous run with every fault that can occur. The run continues, counts the faults, and can be
resumed."""

import os
import re
import resource
import subprocess
import time

from run_util import ENVIRONMENT, final_state, last_checkpoint, read_metrics, write_experiment
from test_train import trained_groups, wait_for_steps

# The fault depends on the completion, not on chance. A tenth hangs, a tenth kills its worker, three tenths
# raise.
REWARD = """
import os, time, zlib


def score(completion):
    case = zlib.crc32(completion.encode()) % 10
    if case == 0:
        time.sleep(3600)
    if case == 1:
        os._exit(7)
    if case < 5:
        raise ValueError("half of them fail")
    return case % 2
"""


def wait_for_log(run, words: str, process, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "log.txt").exists() and words in (run / "log.txt").read_text():
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"no {words!r} in the log; exit code {process.poll()}: {process.communicate()}")


def test_a_run_outlives_its_faults_and_resumes(bough):
    (bough.cwd / "faulty.py").write_text(REWARD)
    config = write_experiment(
        bough,
        **{
            "reward": "faulty.py:score",
            "reward_service.timeout_seconds": 0.3,
            "reward_service.retries": 0,
            "reward_service.workers": 4,
            "gconfig.n_samples": 6,
            "rollout.max_head_offpolicyness": 2,
            "rollout.min_group": 2,
            "saver.freq_steps": 1,
            "evaluator.freq_steps": 0,
            "evaluator.at_start": False,
            "evaluator.at_end": False,
            "total_train_steps": 100000,
        },
    )
    run = bough.cwd / "runs/tiny/trial0"
    # A full disk: files end at 20,000 bytes. The model needs more, and the log needs less. The limit's signal
    # is ignored, so that the write fails as on a full disk.
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" XFSZ; exec "$@"', "sh", str(bough.program), "train", str(config)],
        cwd=bough.cwd,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_steps(run, 2, process, seconds=120)
        before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        wait_for_log(run, "tries again after the next step", process)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
        done = len(read_metrics(run))
        wait_for_steps(run, done + 1, process, seconds=120)
    finally:
        process.kill()  # the next fault
        process.communicate()
    saved = int(re.search(r"\d+$", last_checkpoint(run).name)[0])
    assert saved >= 2
    steps = max(saved, len(read_metrics(run))) + 2
    bough("train", config, f"total_train_steps={steps}", ok=True, env=ENVIRONMENT)
    records = read_metrics(run)
    assert [record["step"] for record in records] == list(range(1, steps + 1)), "metrics continue"
    assert sum(record["reward/failures"] for record in records) > 0
    # Samples without a reward were replaced, so every step has its three groups.
    assert [record["rollout/batch_groups"] for record in records] == [3] * steps
    assert len(trained_groups(run)) == 3 * steps


# Each step has twelve rewards, so the first one that fails is of step 3.
FAILS_IN_STEP_3 = """
import os

calls = 0


def score(completion):
    global calls
    calls += 1
    if calls > 24 and not os.path.exists("healthy"):
        raise ValueError("the rewards' service is gone")
    return len(completion) % 2
"""


def test_a_run_that_an_error_ends_writes_its_last_step_and_resumes_bit_for_bit(bough):
    (bough.cwd / "failing.py").write_text(FAILS_IN_STEP_3)
    config = write_experiment(
        bough,
        **{
            "reward": "failing.py:score",
            "reward_service.workers": 1,
            "reward_service.retries": 0,
            "reward_service.max_consecutive_failures": 1,
            "saver.freq_steps": 10,
            "evaluator.freq_steps": 0,
            "evaluator.at_start": False,
            "evaluator.at_end": False,
            "total_train_steps": 5,
        },
    )
    run = bough.cwd / "runs/tiny/trial0"
    failed = bough("train", config, ok=False, env=ENVIRONMENT)
    assert "the rewards' service is gone" in failed.stderr
    assert "the same command continues from the checkpoint of step 2" in failed.stderr
    assert last_checkpoint(run).name == "step_2"
    assert [record["step"] for record in read_metrics(run)] == [1, 2]
    (bough.cwd / "healthy").touch()
    bough("train", config, ok=True, env=ENVIRONMENT)
    bough("train", config, "trial_name=undisturbed", ok=True, env=ENVIRONMENT)
    assert last_checkpoint(run).name == "step_5"
    assert final_state(run) == final_state(run.parent / "undisturbed")
