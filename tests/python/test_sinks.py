"""python -m bough.sinks with the real libraries (scripts/setup_venv sinks), without a network: wandb's
offline files and trackio's database are read back."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from case_files import set_up

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sinks/bin/python"
PACKAGE = {"PYTHONPATH": str(ROOT / "python")}

# Prints what is in wandb's offline files: the runs by id.
READ_WANDB = """
import json, sys
from pathlib import Path
from bough.sinks import read_wandb

runs = {}
for path in sys.argv[1:]:
    for record in read_wandb(Path(path)):
        if record.HasField("run"):
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            run = runs.setdefault(record.run.run_id, {"steps": [], "exits": []})
            run |= {"name": record.run.display_name, "project": record.run.project, "config": config}
        if record.HasField("history"):
            items = {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            run["steps"].append({k: v for k, v in items.items() if k not in ("_timestamp", "_runtime")})
        if record.HasField("exit"):
            run["exits"].append(record.exit.exit_code)
print(json.dumps(runs))
"""


@pytest.fixture(scope="module", autouse=True)
def environment():
    set_up("sinks")


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder without steps, on which this process works."""
    folder = tmp_path / "runs" / "sums" / "grpo"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 3\nactor:\n  optimizer: {lr: 1.0e-05}\n")
    (folder / "log.txt").write_text("a line\n")
    (folder / "metrics.jsonl").write_text("")
    set_state(folder, "running")
    return folder


def set_state(run: Path, state: str) -> None:
    holder = f"process {os.getpid()} on {os.uname().nodename}" if state == "running" else ""
    (run / "progress.json").write_text(json.dumps({"state": state}))
    (run / ".lock").write_text(holder)


def add_steps(run: Path, *steps: int, reward: float = 0.5) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "reward/mean": reward + step, "loss/policy": None}) + "\n")


def cut_after(run: Path, step: int) -> None:
    """As a run that is resumed: another file with that name."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "new").write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    (run / "new").rename(run / "metrics.jsonl")


def start(run: Path, *options: str, python: Path = PYTHON, **variables: str) -> subprocess.Popen:
    offline = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(run / "trackio")}
    return subprocess.Popen(
        [python, "-m", "bough.sinks", run, *options],
        env={**os.environ, **PACKAGE, **offline, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code, output + errors
    return errors


def send(run: Path, *options: str) -> str:
    return finish(start(run, *options))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wandb_runs(run: Path) -> dict:
    """The runs of the offline files, by id."""
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    done = subprocess.run(
        [PYTHON, "-c", READ_WANDB, *files], env=PACKAGE, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def trackio_runs(run: Path) -> dict:
    """The steps of each run, in the order in which they were stored."""
    with contextlib.closing(sqlite3.connect(run / "trackio" / "project.db")) as database:
        runs: dict = {}
        for name, step, metrics in database.execute(
            "select run_name, step, metrics from metrics order by id"
        ):
            runs.setdefault(name, []).append({"_step": step, **json.loads(metrics)})
        return runs


def last_stored(run: Path) -> int:
    """The step that trackio stored last, -1 if there is none."""
    try:
        return list(trackio_runs(run).values())[-1][-1]["_step"]
    except (sqlite3.OperationalError, IndexError):  # trackio has not made the database yet
        return -1


def test_both_services_get_each_step_of_a_run_while_it_works_and_its_settings(run):
    process = start(run, "--wandb", "project", "--trackio", "project")
    add_steps(run, 0, 1)
    wait_for(lambda: last_stored(run) == 1, process)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":2,"rew')  # the run is writing this line
    time.sleep(1.5)
    assert process.poll() is None
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ard/mean":2.5}\n')
    wait_for(lambda: last_stored(run) == 2, process)
    add_steps(run, 3)
    set_state(run, "finished")
    finish(process)

    expected = [
        {"_step": 0, "reward/mean": 0.5, "loss/policy": "NaN"},
        {"_step": 1, "reward/mean": 1.5, "loss/policy": "NaN"},
        {"_step": 2, "reward/mean": 2.5},
        {"_step": 3, "reward/mean": 3.5, "loss/policy": "NaN"},
    ]
    ((name, found),) = wandb_runs(run).items()
    assert json.loads(json.dumps(found["steps"]).replace("NaN", '"NaN"')) == expected
    assert (found["project"], found["name"], found["exits"]) == ("project", "sums/grpo", [0])
    assert found["config"]["seed"] == 3 and found["config"]["actor"] == {"optimizer": {"lr": 1e-5}}
    assert name.startswith("sums-grpo-")
    ((name, steps),) = trackio_runs(run).items()
    assert steps == expected and name.startswith("sums-grpo-")
    with contextlib.closing(sqlite3.connect(run / "trackio" / "project.db")) as database:
        config = json.loads(database.execute("select config from configs").fetchone()[0])
    assert config["seed"] == 3 and config["name"] == "sums/grpo"


def test_a_process_that_was_killed_goes_on_without_a_step_twice_and_without_a_gap(run):
    add_steps(run, *range(400))
    for sent in (400, 800):
        process = start(run, "--wandb", "project", "--trackio", "project")
        wait_for(lambda least=sent: last_stored(run) >= least - 400, process)
        process.kill()  # both services lose the last steps that they were given
        process.wait()
        add_steps(run, *range(sent, sent + 400))
    set_state(run, "finished")
    send(run, "--wandb", "project", "--trackio", "project")
    (found,) = wandb_runs(run).values()
    assert [record["_step"] for record in found["steps"]] == list(range(1200))
    (steps,) = trackio_runs(run).values()
    assert [record["_step"] for record in steps] == list(range(1200))


def test_a_run_that_went_back_to_a_checkpoint_is_the_same_run(run):
    process = start(run, "--trackio", "project", "--follow")
    add_steps(run, 0, 1, 2, 3, 4)
    wait_for(lambda: last_stored(run) == 4, process)
    set_state(run, "stopped")
    cut_after(run, 2)
    time.sleep(1.5)
    set_state(run, "running")
    add_steps(run, 3, 4, 5, 6, reward=0.75)
    wait_for(lambda: last_stored(run) == 6, process)
    process.send_signal(signal.SIGINT)
    assert "the run went back to step 2. Steps up to 4 were sent before" in finish(process)
    cut_after(run, 5)  # and once more, while no process sends
    add_steps(run, 6, 7, reward=0.75)
    set_state(run, "finished")
    send(run, "--trackio", "project")
    (steps,) = trackio_runs(run).values()
    assert [record["_step"] for record in steps] == list(range(8))
    assert [record["reward/mean"] for record in steps] == [0.5, 1.5, 2.5, 3.5, 4.5, 5.75, 6.75, 7.75]


def test_a_run_that_began_anew_is_a_new_run_and_a_failed_run_is_marked(run):
    process = start(run, "--wandb", "project", "--trackio", "project")
    add_steps(run, 1, 2, 3)
    wait_for(lambda: last_stored(run) == 3, process)
    cut_after(run, -1)  # there was no checkpoint
    add_steps(run, 1, 2, reward=0.25)
    wait_for(lambda: last_stored(run) == 2, process)
    set_state(run, "failed")
    finish(process)
    for runs in (wandb_runs(run), {name: {"steps": steps} for name, steps in trackio_runs(run).items()}):
        rewards = [[record["reward/mean"] for record in found["steps"]] for found in runs.values()]
        assert rewards == [[1.5, 2.5, 3.5], [1.25, 2.25]]
    assert [found["exits"] for found in wandb_runs(run).values()] == [[0], [1]]


def test_a_run_whose_process_was_killed_ends(run):
    add_steps(run, 1)
    gone = subprocess.Popen(["true"])
    gone.wait()
    (run / ".lock").write_text(f"process {gone.pid} on {os.uname().nodename}")
    send(run, "--wandb", "project")
    (found,) = wandb_runs(run).values()
    assert found["exits"] == [1]


def test_one_process_at_a_time_sends_a_run(run):
    process = start(run, "--trackio", "project", "--follow")
    wait_for((run / "sinks.lock").exists, process)
    errors = finish(start(run, "--wandb", "project"), 2)
    assert "another process sends the run" in errors
    process.send_signal(signal.SIGTERM)
    finish(process)


def test_a_real_run_is_sent_to_the_end(bough_program, tmp_path):
    for words in (
        "init base --hidden-size 32 --layers 2 --heads 2 --kv-heads 1",
        "data sums --out train.jsonl -n 20 --max-operand 9",
    ):
        subprocess.run([bough_program, *words.split()], check=True, capture_output=True, cwd=tmp_path)
    settings = {
        "experiment_name": "sums",
        "model": {"path": "base"},
        "train_dataset": {"path": "train.jsonl", "batch_size": 4},
        "gconfig": {"n_samples": 2, "max_new_tokens": 8},
        "total_train_steps": 3,
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    run = tmp_path / "runs/sums/trial0"
    process = start(
        run, "--wandb", "project", "--trackio", "project", "--follow", TRACKIO_DIR=str(tmp_path / "trackio")
    )
    subprocess.run([bough_program, "train", "config.yaml"], check=True, capture_output=True, cwd=tmp_path)
    wait_for(lambda: last_stored(tmp_path) == 3, process)
    process.send_signal(signal.SIGINT)
    finish(process)
    (found,) = wandb_runs(run).values()
    expected = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [{"step": record.pop("_step"), **record} for record in found["steps"]] == expected
    assert found["config"]["gconfig"]["n_samples"] == 2


@pytest.mark.parametrize(
    "prepare, options, message",
    [
        (lambda run: None, [], "where to? Give --wandb PROJECT, --trackio PROJECT or both"),
        (lambda run: (run / "config.yaml").unlink(), ["--wandb", "p"], "is not a run's folder"),
        (lambda run: (run / "metrics.jsonl").write_text("7\n"), ["--wandb", "p"], "the file is damaged"),
        (lambda run: (run / "sinks.json").write_text("{"), ["--wandb", "p"], "the run is sent again"),
    ],
)
def test_wrong_use_gets_a_message(run, prepare, options, message):
    prepare(run)
    assert message in finish(start(run, *options), 2)


def test_a_library_that_is_not_installed_is_named_with_the_remedy(run):
    """.venv has neither."""
    for service in ("wandb", "trackio"):
        errors = finish(start(run, f"--{service}", "p", python=Path(sys.executable)), 2)
        assert f"{service} is not installed in {sys.executable}; install it: " in errors
        assert f"-m pip install {service}==" in errors


def test_without_a_key_wandb_says_what_to_do(run):
    add_steps(run, 1)
    set_state(run, "finished")
    process = start(run, "--wandb", "p", WANDB_MODE="online", WANDB_API_KEY="", HOME=str(run))
    errors = finish(process, 2)
    assert "WANDB_MODE=offline" in errors
