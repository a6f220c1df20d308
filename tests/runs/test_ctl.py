"""Commands to a run that works: `bough ctl`, and the buttons of its page."""

import contextlib
import json
import stat
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from browser import Browser, in_chromium
from run_util import ENVIRONMENT, comparable_metrics, final_state, read_metrics, write_experiment


def wait_until(condition, process: subprocess.Popen) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def has_steps(run: Path, count: int):
    def reached() -> bool:
        return (run / "metrics.jsonl").exists() and len(read_metrics(run)) > count

    return reached


def activity_of(run: Path) -> str:
    """What progress.json says. The run writes it in place, at most once a second: it may be incomplete."""
    with contextlib.suppress(ValueError):
        return json.loads((run / "progress.json").read_text())["activity"]
    return ""


@contextlib.contextmanager
def live_run(bough, *arguments: str, **settings: object):
    """A run that would take many steps, after its first one."""
    defaults = {"total_train_steps": 100_000, "evaluator.freq_steps": 0, "saver.freq_steps": 0}
    config = write_experiment(bough, **{**defaults, **settings})
    process = bough.start("train", config, *arguments, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    try:
        wait_until(has_steps(run, 1), process)
        yield run, process
    finally:
        process.kill()
        process.communicate()


def ctl(bough, run: Path, command: str) -> str:
    return bough("ctl", run, command, ok=True).stdout.strip()


@pytest.mark.parametrize("eta", [0, 2])
def test_each_command_says_what_happened(bough, eta):
    with live_run(bough, **{"rollout.max_head_offpolicyness": eta}) as (run, process):
        paused = ctl(bough, run, "pause")
        step = int(paused.removeprefix("paused after step "))
        assert step >= 1
        lines = len(read_metrics(run))
        refused = bough("ctl", run, "pause")
        assert refused.returncode == 2 and "paused already" in refused.stderr
        assert "resume first" in bough("ctl", run, "evaluate").stderr
        assert f"checkpoint of step {step}: " in ctl(bough, run, "checkpoint")
        assert (run / f"checkpoints/step_{step}/state.json").is_file()
        assert "has a checkpoint already" in bough("ctl", run, "checkpoint").stderr
        wait_until(lambda: activity_of(run) == f"paused after step {step}", process)
        assert len(read_metrics(run)) == lines, "a step was trained in the pause"
        assert ctl(bough, run, "resume") == f"continues after step {step}"
        assert "is not paused" in bough("ctl", run, "resume").stderr
        wait_until(has_steps(run, step + 1), process)
        evaluation = ctl(bough, run, "evaluate")
        evaluated = [
            record for record in read_metrics(run) if "eval/avg_at_k" in record and record["step"] > 0
        ]
        assert evaluation.startswith(f"evaluation of step {evaluated[0]['step']}: avg@k ")
        stopped = ctl(bough, run, "stop")
        assert process.wait(300) == 130
        last = json.loads((run / "progress.json").read_text())["step"]
        assert stopped.startswith(f"stopped after step {last}; checkpoint: ")
        assert (run / "latest").read_text().strip() == f"step_{last}"
        dead = bough("ctl", run, "pause")
        assert dead.returncode == 2 and "not alive" in dead.stderr


def test_a_pause_changes_no_bit_of_a_synchronous_run(bough):
    # A step takes hundredths of a second: the run must not be over before it is paused.
    config = write_experiment(bough, **{"total_train_steps": 200, "saver.freq_steps": 50})
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    whole, paused = bough.cwd / "runs/tiny/whole", bough.cwd / "runs/tiny/paused"
    calibration = f"calibration={whole / 'calibration.json'}"
    process = bough.start("train", config, "trial_name=paused", calibration, env=ENVIRONMENT)
    wait_until(has_steps(paused, 1), process)
    assert "paused after step" in ctl(bough, paused, "pause")
    assert ctl(bough, paused, "resume").startswith("continues after step")
    assert process.wait(300) == 0, process.communicate()
    assert comparable_metrics(whole) == comparable_metrics(paused)
    assert final_state(whole) == final_state(paused)


def post(url: str, headers: dict[str, str]) -> tuple[int, dict]:
    request = urllib.request.Request(url, method="POST", headers=headers, data=b"")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_page_of_a_run_takes_commands_with_its_token_only(bough):
    with live_run(bough, "report.port=0") as (run, process):
        file = run / "control/page_url"
        assert stat.S_IMODE((run / "control").stat().st_mode) == 0o700
        url, token = file.read_text().strip().split("/?token=")
        assert token not in (run / "log.txt").read_text()
        command = f"{url}/api/control?run=0&command="
        assert post(command + "pause", {})[0] == 403
        assert post(command + "pause", {"X-Bough-Token": token[:-1]})[0] == 403
        assert post(command + "pause", {"X-Bough-Token": token, "Origin": "http://example.org"})[0] == 403
        assert "paus" not in activity_of(run)
        status, body = post(command + "pause", {"X-Bough-Token": token})
        assert status == 200 and body["text"].startswith("paused after step")
        status, body = post(command + "pause", {"X-Bough-Token": token})
        assert status == 409 and "already" in body["error"]
        assert post(command + "format", {"X-Bough-Token": token})[0] == 409
        status, body = post(command + "stop", {"X-Bough-Token": token})
        assert status == 200 and body["text"].startswith("stopped after step")
        assert process.wait(300) == 130


@in_chromium
def test_the_buttons_of_the_page(bough, tmp_path):
    with live_run(bough, "report.port=0") as (run, process), Browser(tmp_path / "profile") as page:
        url = (run / "control/page_url").read_text().strip()
        controls = "document.querySelector('.run-controls')"
        button = f"[...{controls}.querySelectorAll('button')]"
        page.open(url.split("?")[0])
        page.wait_for("document.getElementById('connection').textContent === 'live'")
        assert page.run(f"{controls}.hidden"), "without the token there are no buttons"
        page.open(url)
        page.wait_for(f"!{controls}.hidden")
        assert "token" not in page.run("location.href")
        page.run(f"{button}.find(each => each.textContent === 'pause').click()")
        page.wait_for(f"{controls}.textContent.includes('paused after step')")
        page.wait_for("document.getElementById('now').innerText.includes('paused after step')")
        page.wait_for(f"{button}.some(each => each.textContent === 'resume' && !each.disabled)")
        page.run(f"{button}.find(each => each.textContent === 'resume').click()")
        page.wait_for(f"{controls}.textContent.includes('continues after step')")
        page.run(f"{button}.find(each => each.textContent === 'stop').click()")
        page.wait_for(f"{controls}.textContent.includes('press again')")
        assert process.poll() is None
        # After five seconds the button forgets the first press.
        page.run(
            f"(stop => {{ if (!stop.armed) stop.click(); stop.click(); }})"
            f"({button}.find(each => each.textContent.startsWith('stop')))"
        )
        assert process.wait(300) == 130
        assert page.errors() == []
