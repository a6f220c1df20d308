"""The conversations of a run: `bough trace`, what a resumed run keeps of them, and how fast many are read."""

import json
import os
import random
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from browser import Browser, in_chromium
from run_util import ENVIRONMENT, last_checkpoint, read_rollouts, write_experiment
from test_ctl import has_steps, wait_until
from test_view import has, viewer

FILTER = "def keep(answer, **fields):\n    return int(answer.split()[-1]) % 3 > 0\n"


def traced_groups(run: Path) -> dict[str, list[str]]:
    """The groups of each file, trained and dropped."""
    files = [*(run / "rollouts").iterdir(), *(run / "traces").glob("dropped_*")]
    return {file.name: sorted({row["group"] for row in read_rollouts(file)}) for file in files}


@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_resumed_run_neither_repeats_nor_loses_a_conversation(bough, seed, eta):
    (bough.cwd / "filter.py").write_text(FILTER)
    config = write_experiment(
        bough,
        **{
            "filter": "filter.py:keep",
            "saver.freq_steps": 3,
            "total_train_steps": 30,
            "evaluator.freq_steps": 0,
            "rollout.max_head_offpolicyness": eta,
        },
    )
    bough("data", "sums", "--out", "train.jsonl", "-n", 200, "--max-operand", 50, ok=True)
    run = bough.cwd / "runs/tiny/trial0"
    moments = random.Random(seed)
    for kill in range(3):
        process = bough.start("train", config, env=ENVIRONMENT)
        wait_until(has_steps(run, 4 * kill + moments.randrange(4)), process)
        time.sleep(moments.uniform(0, 0.1))
        if kill == 1:  # stopped: the checkpoint is of a moment after the end of a step
            process.terminate()
        else:
            process.kill()
        process.communicate()
    bough("train", config, ok=True, env=ENVIRONMENT)
    groups = [group for file in traced_groups(run).values() for group in file]
    assert len(set(groups)) == len(groups), "a group is stored twice"
    state = json.loads((last_checkpoint(run) / "state.json").read_text())["state"]["controller"]
    assert len(groups) == state["next_position"], "a group that was begun is not stored"
    assert len(groups) > 90, "no group was dropped"
    if eta == 0:
        whole = bough.cwd / "runs/tiny/whole"
        bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
        stopped, at_once = traced_groups(run), traced_groups(whole)
        steps = {file for file in at_once if file.startswith("step_")}
        assert {file: stopped[file] for file in steps} == {file: at_once[file] for file in steps}
        # A stop within a step binds the groups that it has dropped so far to the step before.
        assert sorted(groups) == sorted(group for file in at_once.values() for group in file)
    assert not list((run / "traces").glob("waiting_*"))


def test_trace_prints_the_conversations_of_a_run(bough):
    (bough.cwd / "filter.py").write_text(FILTER)
    (bough.cwd / "reward.py").write_text(
        "def score(completion, **fields):\n"
        "    if len(completion) % 3 == 0:\n        raise ValueError('too odd')\n"
        "    return len(completion) % 5\n"
    )
    config = write_experiment(bough, filter="filter.py:keep", reward="reward.py:score", total_train_steps=3)
    bough("train", config, ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    rows = read_rollouts(run / "rollouts/step_2.jsonl.zst") + read_rollouts(
        run / "traces/dropped_2.jsonl.zst"
    )
    rewards = sorted(row["reward"] for row in rows if row.get("valid", True))
    worst = bough("trace", run, "--step", 2, "--worst", 4, "--json", ok=True).json["conversations"]
    assert [one["reward"] for one in worst] == rewards[:4]
    assert all(one["step"] == 2 and len(one["rows"]) == 1 for one in worst)
    best = bough("trace", run, "--best", 1, "--json", ok=True).json["conversations"][0]
    assert best["reward"] >= max(rewards)
    text = bough("trace", run, "--id", best["id"], ok=True).stdout
    assert text.startswith(f"== {best['id']} {best['rows'][0]['group']}: reward ")
    assert f"[prompt] {best['rows'][0]['prompt'].splitlines()[0]}" in text and "[completion]" in text
    longest = bough("trace", run, "--longest", 3, "--json", ok=True).json["conversations"]
    assert [one["tokens"] for one in longest] == sorted((one["tokens"] for one in longest), reverse=True)
    failed = bough("trace", run, "--failed", ok=True).stdout
    assert "dropped: filter" in failed and "20 of " in failed
    number = next(i for i, row in enumerate(rows) if not row.get("valid", True))
    id_of_failed = f"2.{number // 4 + 1}.{number % 4 + 1}"  # groups have 4 samples
    text = bough("trace", run, "--id", id_of_failed, ok=True).stdout
    assert "no reward" in text and "[failure] " in text and "too odd" in text
    assert "of 12 conversations" not in bough("trace", run, ok=True).stdout  # 3 groups of 4: all fit
    evaluated = bough("trace", run, "--evaluation", "--best", 2, "--json", ok=True).json["conversations"]
    assert [one["evaluation"] for one in evaluated] == ["eval", "eval"] and evaluated[0]["step"] == 3
    first = bough("trace", run, "--evaluation", "--step", 0, "--json", ok=True).json
    assert first["count"] == len(read_rollouts(run / "traces/evaluation_0.jsonl.zst")) > 0
    assert first["conversations"][0]["id"] == "0.1.1"
    for wrong in (["--id", "7"], ["--step", 9], ["--worst", 1, "--best", 1], ["--id", "1.99.1"]):
        refused = bough("trace", run, *wrong)
        assert refused.returncode == 2, str(refused)


@in_chromium
def test_the_page_shows_samples_before_their_step_ends_and_those_that_were_dropped(bough, tmp_path):
    (bough.cwd / "filter.py").write_text(FILTER)
    config = write_experiment(
        bough,
        **{
            "filter": "filter.py:keep",
            "rollout.max_head_offpolicyness": 3,
            "total_train_steps": 100_000,
            "evaluator.freq_steps": 0,
        },
    )
    process = bough.start("train", config, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    try:
        wait_until(has_steps(run, 3), process)
        # A paused asynchronous run has samples that wait.
        paused = bough("ctl", run, "pause", ok=True).stdout
        step = int(paused.split()[-1])
        assert list((run / "traces").glob("waiting_*"))
        with viewer(bough, str(run)) as url, Browser(tmp_path / "profile") as page:
            page.open(url)
            page.wait_for(f"document.querySelector('#samples select').value === '{step + 1}'")
            page.wait_for(has("samples", "waits for its step"))
            page.wait_for("document.querySelectorAll('#samples .sample').length === 4")
            dropped = next(n for n in range(1, step + 1) if (run / f"traces/dropped_{n}.jsonl.zst").exists())
            page.run(f"panels.find(each => each.id === 'samples').go({dropped}, 3)")
            page.wait_for(has("samples", "dropped: filter"))
            assert page.errors() == []
    finally:
        process.kill()
        process.communicate()


def write_many(run: Path, num_steps: int, tokens: int) -> None:
    """A run's folder of `num_steps` steps with 100 samples each. Four are made, the others are copies."""
    (run / "rollouts").mkdir(parents=True)
    (run / "traces").mkdir()
    (run / "config.yaml").write_text("seed: 3\n")
    draw = random.Random(7)
    index = []
    for step in range(1, num_steps + 1):
        file = run / f"rollouts/step_{step}.jsonl.zst"
        if step <= 4:
            frames, rewards = b"", []
            for group in range(10):
                lines = [json.dumps(sample(draw, f"p{step}_{group}", tokens)) for _ in range(10)]
                rewards += [json.loads(line)["reward"] for line in lines]
                text = "\n".join(lines).encode() + b"\n"
                frames += subprocess.run(["zstd", "-q"], input=text, capture_output=True, check=True).stdout
            conversations = [
                [i // 10, i % 10, reward, 0.5, tokens - 20, False, False] for i, reward in enumerate(rewards)
            ]
            columns = {"bytes": [len(frames), 0], "conversations": conversations}
            file.write_bytes(frames)
            index.append(columns)
        else:
            file.write_bytes((run / f"rollouts/step_{(step - 1) % 4 + 1}.jsonl.zst").read_bytes())
            index.append(index[(step - 1) % 4])
    lines = [json.dumps({"step": step, **columns}) for step, columns in enumerate(index, 1)]
    (run / "traces/index.jsonl").write_text("\n".join(lines) + "\n")


def sample(draw: random.Random, group: str, tokens: int) -> dict:
    return {
        "group": group,
        "input_ids": [draw.randrange(50_000) for _ in range(tokens)],
        "loss_mask": [int(i >= 20) for i in range(tokens)],
        "logprobs": [0] * 20 + [-round(draw.random(), 5) for _ in range(tokens - 20)],
        "reward": round(draw.random(), 6),
        "advantage": 0.5,
        "prompt": "What is it?",
        "completion": "x" * tokens,
    }


def resident_bytes(process: subprocess.Popen) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_many_conversations_are_found_by_their_index(bough):
    """With BOUGH_TRACES=1000: 100,000 conversations, 1 GB of JSON. Seconds and bytes are printed."""
    num_steps = int(os.environ.get("BOUGH_TRACES", "8"))
    run = bough.cwd / "runs/many/trial0"
    write_many(run, num_steps, 500 if "BOUGH_TRACES" in os.environ else 40)
    for arguments in (["--worst", 5], ["--step", num_steps, "--worst", 5], []):
        begin = time.monotonic()
        found = bough("trace", run, "--json", *arguments, ok=True).json["conversations"]
        print("trace", *arguments, f"{time.monotonic() - begin:.2f} s")
        assert len(found) == (5 if arguments else 20)
    process = bough.start("view", run, "--json")
    url = json.loads(process.stdout.readline())["url"]
    for path in ("/", "/api/snapshot", f"/api/step?run=0&step={num_steps}&first=0"):
        begin = time.monotonic()
        size = len(urllib.request.urlopen(url + path, timeout=60).read())
        print(path, size, f"bytes in {time.monotonic() - begin:.2f} s, peak", resident_bytes(process))
    process.terminate()
    process.communicate()
    everything = bough("trace", run, "--worst", 5, "--json", ok=True).json["conversations"]
    (run / "traces/index.jsonl").unlink()
    assert bough("trace", run, "--worst", 5, "--json", ok=True).json["conversations"] == everything
