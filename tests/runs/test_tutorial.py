"""docs/tutorial.md: its commands run as they stand there, with fewer steps, and print the lines that it
shows."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from run_util import ENVIRONMENT, read_metrics

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs/tutorial.md").read_text()
SHORTER = {"--max-steps 1500": "--max-steps 20", "problems 400": "problems 16", "problems 100": "problems 4"}
FEWER_STEPS = "total_train_steps=2 gconfig.n_samples=4 train_dataset.batch_size=4 evaluator.n_samples=1"


def commands() -> list[tuple[str, list[str]]]:
    """The commands of the console blocks, each with the output that the page shows."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", TUTORIAL, re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def first_words(lines: list[str]) -> list[str]:
    """The labels of results: "step 1/50  reward 0.656" has the label "step N/N"."""
    labelled = [line for line in lines if re.search(r"\S\s{2,}\S", line)]
    return [re.sub(r"\d+", "N", re.split(r"\s{2,}", line)[0]) for line in labelled]


@pytest.fixture
def checkout(bough):
    """A folder with what the commands need of a checkout."""
    for name in ("examples", "configs"):
        (bough.cwd / name).symlink_to(ROOT / name)
    return bough


def test_the_commands_of_the_tutorial_train_an_agent(checkout):
    ran = set()
    for command, shown in commands():
        for long, short in SHORTER.items():
            command = command.replace(long, short)
        words = shlex.split(command)
        if words[0] == "bough":
            more = FEWER_STEPS.split() if words[1] == "train" else []
            result = checkout(*words[1:], *more, ok=True, env=ENVIRONMENT)
            printed = result.stdout + result.stderr
            ran.add(words[1])
        else:
            printed = subprocess.run(
                command, shell=True, check=True, capture_output=True, text=True, cwd=checkout.cwd
            ).stdout
        if words[:2] != ["bough", "rollout"]:  # an untrained model calls other tools
            missing = set(first_words(shown)) - set(first_words(printed.splitlines()))
            assert not missing, (command, missing, printed)
        if words[0] == "head" and shown:
            assert printed.splitlines() == shown  # the page's problem is that of the seed
    assert ran == {"init", "sft", "rollout", "train"}
    run = checkout.cwd / "runs/ticket_desk/grpo"
    assert [record["step"] for record in read_metrics(run)] == [0, 1, 2]
    assert (run / "report.html").is_file()
    watched = checkout("watch", "runs/ticket_desk/grpo", ok=True)
    assert "finished" in watched.stdout + watched.stderr


def test_the_environment_on_the_page_is_that_of_the_example():
    (shown,) = re.findall(r"```python\n(.*?)```", TUTORIAL, re.S)
    assert shown in (ROOT / "examples/ticket_desk/ticket_desk.py").read_text()
