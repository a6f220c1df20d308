"""The page of a run: served by `bough view`, by the run itself, and saved as report.html. Tests of its panels
need Chromium and are skipped without it, except in CI."""

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, in_chromium
from run_util import ENVIRONMENT, comparable_metrics, final_state, read_metrics, write_experiment

ATTACK = (
    "\"'></pre></script><script>window.attacked=1</script><img src=x onerror=window.attacked=1>{{data}}&amp;"
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as page:
        yield page
        assert page.errors() == []


@contextlib.contextmanager
def viewer(bough, *runs: str) -> Iterator[str]:
    process = bough.start("view", *runs, "--json")
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def text_of(browser: Browser, panel: str) -> str:
    return browser.run(f"document.getElementById('{panel}').innerText")


def has(panel: str, text: str) -> str:
    return f"document.getElementById('{panel}').innerText.includes({json.dumps(text)})"


def num_steps(name: str = "reward/mean") -> str:
    return f"(run() && run().curves['{name}'] || {{steps: []}}).steps.length"


def write_hostile_run(folder: Path) -> Path:
    """A run's folder whose every text is an attack."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"# {ATTACK}\nseed: 3\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5, ATTACK: 1.0}) + "\n")
    (folder / "log.txt").write_text(f"2026-11-27 10:06:34.320 warning: {ATTACK}\n")
    (folder / "progress.json").write_text(json.dumps({"state": "failed", "error": ATTACK, "total_steps": 9}))
    (folder / "timeline.jsonl").write_text(json.dumps(["engine", ATTACK, 0, 1]) + "\n")
    sample = {
        "group": ATTACK,
        "input_ids": [1, 2, 3],
        "loss_mask": [0, 1, 1],
        "logprobs": [0, -1, -1],
        "reward": 1,
    }
    texts = {"prompt": ATTACK, "completion": ATTACK, "answer": ATTACK, "finish_reason": ATTACK}
    lines = "".join(json.dumps({**sample, **texts}) + "\n" for _ in range(2))
    subprocess.run(
        ["zstd", "-q", "-o", folder / "rollouts/step_1.jsonl.zst"], input=lines.encode(), check=True
    )
    return folder


def test_a_run_that_serves_its_page_computes_the_same_bits(bough):
    # The run must not be over before it has answered.
    config = write_experiment(bough, total_train_steps=60)
    shared = ("--json", "calibration=runs/tiny/a/calibration.json")
    bough("train", config, "trial_name=a", "--json", ok=True, env=ENVIRONMENT)
    bough("train", config, "trial_name=b", *shared, ok=True, env=ENVIRONMENT)
    process = bough.start("train", config, "trial_name=c", "report.port=0", *shared, env=ENVIRONMENT)
    url, requests = "", 0
    log = bough.cwd / "runs/tiny/c/log.txt"
    while process.poll() is None:
        if not url and log.exists() and "the page of the run: " in log.read_text():
            url = log.read_text().split("the page of the run: ")[1].split()[0]
        with contextlib.suppress(OSError):
            if url and urllib.request.urlopen(url + "/api/snapshot", timeout=5).status == 200:
                requests += 1
    assert process.returncode == 0, process.communicate()
    assert requests > 0
    b, c = bough.cwd / "runs/tiny/b", bough.cwd / "runs/tiny/c"
    assert comparable_metrics(b) == comparable_metrics(c)
    assert final_state(b) == final_state(c)
    assert json.loads((c / "progress.json").read_text())["state"] == "finished"


NUM_STEPS = 100


@in_chromium
def test_the_page_follows_a_run_and_its_report_shows_the_same(bough, browser):
    config = write_experiment(bough, **{"total_train_steps": NUM_STEPS, "rollout.max_head_offpolicyness": 1})
    process = bough.start("train", config, "report.port=0", env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or "reward/mean" not in metrics.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)  # the run may be over before the browser has opened
    with viewer(bough, str(run)) as url:
        browser.open(url)
        browser.wait_for(has("now", "running"))
        browser.wait_for(f"{num_steps()} >= 1")
        first = browser.run(num_steps())
        assert first < NUM_STEPS
        process.send_signal(signal.SIGCONT)
        browser.wait_for(f"{num_steps()} > {first}")
        browser.wait_for("document.getElementById('connection').textContent === 'live'")
        assert process.wait(300) == 0
        browser.wait_for(has("now", "finished"))
        browser.wait_for(f"{num_steps()} === {NUM_STEPS}")
        browser.wait_for("document.querySelectorAll('#samples .sample').length === 4")
        browser.resize(1280, 20_000)  # draws all charts: those out of view are drawn when they come into view
        browser.wait_for("document.getElementById('curves').innerText.includes('avg@k')")
        browser.wait_for("[...document.querySelectorAll('#curves canvas')].every(canvas => !canvas.stale)")
        live = {panel: text_of(browser, panel) for panel in ("curves", "failures", "settings")}
    browser.open((run / "report.html").as_uri())
    browser.wait_for("document.querySelectorAll('#samples .sample').length === 4")
    for panel, text in live.items():
        browser.wait_for(f"document.getElementById('{panel}').innerText === {json.dumps(text)}")
    assert "gconfig.max_new_tokens" in live["settings"]
    assert "Reward: mean and standard deviation" in live["curves"]
    browser.wait_for(has("now", "finished"))
    label = browser.wait_for("document.querySelector('#tree canvas')?.getAttribute('aria-label')")
    assert label.startswith("Prefix tree")
    browser.run("panels.find(each => each.id === 'samples').evaluated.click()")
    browser.wait_for(has("samples", "evaluation, problem 1 of "))
    browser.wait_for(has("samples", f"evaluation after step {NUM_STEPS} (eval)"))
    browser.press("j")
    browser.wait_for(has("samples", "evaluation, problem 2 of "))
    browser.press("k")
    browser.wait_for(has("samples", "evaluation, problem 1 of "))
    browser.press("k")
    browser.wait_for("/group \\d+ of/.test(document.getElementById('samples').innerText)")
    assert len((run / "report.html").read_bytes()) < 20_000_000


@in_chromium
def test_a_run_that_fails_says_why(bough, browser):
    config = write_experiment(bough)
    (bough.cwd / "bad.py").write_text(
        "def score(completion, **fields):\n    raise ValueError('<i>no</i> score')\n"
    )
    failed = bough(
        "train", config, "reward=bad.py:score", "reward_service.max_consecutive_failures=8", env=ENVIRONMENT
    )
    assert failed.returncode != 0
    with viewer(bough, "runs/tiny/trial0") as url:
        browser.open(url)
        browser.wait_for(has("now", "failed"))
        browser.wait_for(has("failures", "<i>no</i> score"))


@in_chromium
def test_a_resumed_run_shows_each_step_once(bough, browser):
    config = write_experiment(bough)
    run = bough.cwd / "runs/tiny/trial0"
    bough("train", config, "total_train_steps=3", ok=True, env=ENVIRONMENT)
    with viewer(bough, str(run)) as url:
        browser.open(url)
        browser.wait_for(f"{num_steps()} === 3")
        with (run / "metrics.jsonl").open(
            "a"
        ) as file:  # a step after the checkpoint, which the resumed run cuts
            file.write('{"step":4,"reward/mean":77}\n')
        browser.wait_for(f"{num_steps()} === 4")
        bough("train", config, "total_train_steps=6", ok=True, env=ENVIRONMENT)
        browser.wait_for("run().curves['reward/mean'].steps.join() === '1,2,3,4,5,6'")
        assert 77 not in browser.run("run().curves['reward/mean'].values")
    assert [record["step"] for record in read_metrics(run)] == list(range(7))


@in_chromium
def test_a_run_of_agents_shows_its_conversations(bough, browser):
    (bough.cwd / "echo.py").write_text(
        "class Echo:\n"
        "    def reset(self, problem, seed):\n"
        "        self.turns = 0\n"
        "        return {'messages': 'say <b>' + problem['answer']}\n"
        "    def step(self, action):\n"
        "        self.turns += 1\n"
        "        return '<script>window.attacked=1</script>', 0.5, self.turns == 2\n"
    )
    environment = {"type": "python", "path": "echo.py:Echo", "python": sys.executable}
    given = {f"environment.{key}": value for key, value in environment.items()}
    config = write_experiment(bough, **given, **{"total_train_steps": 2, "evaluator.freq_steps": 0})
    bough("train", config, ok=True, env=ENVIRONMENT)
    with viewer(bough, "runs/tiny/trial0") as url:
        browser.open(url)
        browser.wait_for("document.querySelectorAll('#samples .talk').length === 4")
        browser.wait_for(has("samples", "say <b>"))
        assert browser.run("window.attacked") is None


@in_chromium
@pytest.mark.parametrize("saved", [False, True])
def test_text_from_data_is_shown_as_text(bough, browser, saved):
    run = write_hostile_run(bough.cwd / "runs/tiny/trial0")
    with contextlib.ExitStack() as stack:
        if saved:
            bough("report", run, ok=True)
            browser.open((run / "report.html").as_uri())
        else:
            browser.open(stack.enter_context(viewer(bough, str(run))))
        browser.wait_for("document.querySelectorAll('#samples .sample').length === 2")
        browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        for panel in ("now", "curves", "samples", "timeline", "failures", "settings"):
            browser.wait_for(has(panel, ATTACK))
        assert browser.run("window.attacked") is None
        assert browser.run("document.images.length") == 0
        assert browser.run("document.scripts.length") == 2


@in_chromium
def test_tokens_of_every_age_have_a_curve_and_the_last_batch_a_histogram(bough, browser):
    run = write_hostile_run(bough.cwd / "runs/tiny/trial0")
    ages = ["0", "1", "2", "3_to_4", "5_to_8", "9_up"]
    lines = [{"step": step, **{f"age_{age}/tokens": step for age in ages}} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with viewer(bough, str(run)) as url:
        browser.resize(1280, 5000)
        browser.open(url)
        for age in ages:
            browser.wait_for(has("curves", "age " + age.replace("_", " ")))
        browser.wait_for(has("now", "Staleness of the last batch"))
        rows = "[...document.querySelectorAll('.ages div')]"
        names = ["0", "1", "2", "3 to 4", "5 to 8", "9+"]
        assert browser.run(f"{rows}.map(row => row.textContent)") == [name + "2" for name in names]
        assert browser.run(f"{rows}.every(row => row.children[1].clientWidth > 100)")


@in_chromium
def test_two_runs_are_laid_over_each_other(bough, browser):
    config = write_experiment(bough, total_train_steps=2)
    for seed in (1, 2):
        bough("train", config, f"trial_name=seed{seed}", f"seed={seed}", ok=True, env=ENVIRONMENT)
    with viewer(bough, "runs/tiny/seed1", "runs/tiny/seed2") as url:
        browser.open(url)
        browser.wait_for(has("curves", "tiny / seed2"))
        browser.wait_for(has("curves", "tiny / seed1"))
        browser.wait_for(has("settings", "seed"))
        assert "seed" in text_of(browser, "settings").split()
        browser.run("chooseRun(1)")
        browser.wait_for("document.getElementById('title').textContent === 'tiny / seed2'")


@in_chromium
def test_the_page_works_by_keyboard_at_both_widths_and_themes(bough, browser):
    config = write_experiment(bough, total_train_steps=2)
    bough("train", config, ok=True, env=ENVIRONMENT)
    browser.open((bough.cwd / "runs/tiny/trial0/report.html").as_uri())
    browser.wait_for("document.querySelectorAll('#samples .sample').length === 4")
    browser.press("j")
    browser.wait_for(has("samples", "group 2 of 3"))
    browser.press("p")
    browser.wait_for(has("samples", "group 1 of 3"))
    browser.wait_for("document.querySelector('#samples select').value === '1'")
    browser.press("/")
    browser.wait_for("document.activeElement.id === 'search'")
    browser.run("document.activeElement.blur()")
    light = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.set_dark(True)
    browser.wait_for(f"getComputedStyle(document.body).backgroundColor !== '{light}'")
    for _ in range(2):  # system, light, dark
        browser.press("t")
    browser.wait_for("document.documentElement.classList.contains('dark')")
    chart = "document.querySelector('#curves canvas')"
    browser.run(f"{chart}.focus()")  # scrolls it into view, so that it is drawn in the new colours
    browser.wait_for(f"!{chart}.stale")
    browser.press("ArrowLeft")
    browser.wait_for("!document.getElementById('tip').hidden")
    browser.wait_for("document.getElementById('tip').textContent.includes('step')")
    for width in (1280, 390):
        browser.resize(width, 800)
        browser.wait_for(f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}")
