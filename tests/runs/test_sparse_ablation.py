"""bench/sparse_ablation.py: verdicts, which runs it still needs, and one whole experiment of a tiny model."""

import dataclasses
import importlib
import json
import math
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_util import read_metrics, read_rollouts, run_experiment

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def ablation():
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("sparse_ablation")
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def report(ablation):
    return ablation.sparse_report


def write_results(ablation, folder, scores, warm_score=0.3):
    """scores: by (warm model, arm, seed)."""
    given = {"steps": 60}
    for (warm, arm, seed), score in scores.items():
        (folder / warm).mkdir(parents=True, exist_ok=True)
        record = {"seconds": {"evaluation": 100}, "dense": {"score": warm_score}}
        (folder / warm / "warm.json").write_text(json.dumps(record))
        run = {"arm": arm, "seed": seed, "definition": dataclasses.asdict(ablation.ARMS[arm]), "given": given}
        run |= {"seconds": {"train": 3000, "evaluation": 500}, "dense": {"score": score}}
        (folder / warm / f"{arm}-seed{seed}.json").write_text(json.dumps(run))
    return ablation.sparse_report.Results(folder, ablation.ARMS)


def test_intervals_are_those_of_students_t(report):
    low, high = report.interval([0.1, 0.2, 0.3])
    assert low == pytest.approx(0.2 - 4.303 * 0.1 / 3**0.5)
    assert high == pytest.approx(0.2 + 4.303 * 0.1 / 3**0.5)
    assert report.interval([0.5]) == (float("-inf"), float("inf"))


def test_verdicts_follow_the_interval(report):
    names = ("equal", "worse")
    assert report.judge([0.09, 0.10, 0.11], names) == "equal"
    assert report.judge([-0.09, -0.10, -0.11], names) == "worse"
    assert report.judge([-0.1, 0.1, 0.3], names) == "undecided"
    assert report.judge([0.3], names) == "undecided"


def test_only_runs_of_one_warm_model_and_one_seed_are_pairs(ablation, tmp_path):
    scores = {("trace-a", "dense", 1): 0.5, ("trace-a", "distill", 1): 0.4, ("trace-a", "distill", 2): 0.4}
    scores |= {("trace-b", "dense", 2): 0.6, ("trace-b", "distill", 3): 0.4}
    results = write_results(ablation, tmp_path, scores)
    pairs = results.pairs("distill", "dense")
    assert [(a["warm"], a["seed"], b["arm"]) for a, b in pairs] == [("trace-a", 1, "dense")]
    assert results.gain(pairs[0][0]) == pytest.approx(0.1)
    assert results.seconds() == 5 * 3500 + 2 * 100


def test_results_of_other_settings_are_refused(ablation, tmp_path):
    write_results(ablation, tmp_path, {("trace-a", "sparse", 1): 0.5})
    path = tmp_path / "trace-a/sparse-seed1.json"
    path.write_text(path.read_text().replace('"block": 4', '"block": 8'))
    with pytest.raises(SystemExit, match="other settings than the arm sparse"):
        ablation.sparse_report.Results(tmp_path, ablation.ARMS)


def experiment_of(ablation, folder, words, warm=None):
    experiment = ablation.Experiment(ablation.parse_arguments([*words.split(), "--out", str(folder / "out")]))
    if warm:
        experiment.warms["trace"] = SimpleNamespace(results=SimpleNamespace(name=warm))
    return experiment


def test_another_warm_model_begins_a_seed_with_dense(ablation, tmp_path):
    finished = {("trace-a", arm, 1): 0.5 for arm in ("dense", "sparse", "distill")}
    results = write_results(ablation, tmp_path / "results", finished | {("trace-a", "dense", 2): 0.5})

    def needed(words, warm):
        experiment = experiment_of(ablation, tmp_path, words, warm)
        return [case for case in experiment.cases() if experiment.is_needed(case, results)]

    main_arms = "--arms dense sparse distill --seeds 1 2"
    assert needed(main_arms, "trace-a") == [("sparse", 2), ("distill", 2)]
    assert needed(main_arms, "trace-b") == [("dense", 2), ("sparse", 2), ("distill", 2)]
    # Without dense, only the arms that a claim compares with each other.
    two = "--arms distill sparse_to_sparse --seeds 1"
    assert needed(two, "trace-a") == [("sparse_to_sparse", 1)]
    assert needed(two, "trace-b") == [("distill", 1), ("sparse_to_sparse", 1)]
    assert needed("--arms sparse distill_12 --seeds 1", "trace-b") == [("distill_12", 1)]


def test_the_table_has_the_runs_of_each_warm_model_apart(ablation, report, tmp_path):
    scores = {("trace-a", "dense", 1): 0.5, ("trace-b", "dense", 1): 0.7, ("trace-a", "dense", 2): 0.6}
    results = write_results(ablation, tmp_path, scores)
    shares = {"until_error": 0.5, "lines": 0.5, "length": 9}
    for record in results.runs:
        record["dense"] |= shares
        record |= {"acceptance": None, "signal": 3.0, "step_seconds": 1.0, "rollout_seconds": 0.5}
    for warm in results.warms.values():
        warm["dense"] |= shares
    rows = [line.split("|")[1:4] for line in report.main_table(results)[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["warm model trace-a", "", "0.300"],
        ["dense", "2", "0.550 (0.500 to 0.600)"],
        ["warm model trace-b", "", "0.300"],
        ["dense", "1", "0.700"],
    ]


def test_an_arm_without_priority_runs_only_if_the_others_keep_their_time(
    ablation, tmp_path, monkeypatch, capsys
):
    started = []
    monkeypatch.setattr(ablation.Experiment, "warm", lambda self, task: None)
    monkeypatch.setattr(
        ablation.Experiment, "train_and_score", lambda self, arm, seed, results: started.append((arm, seed))
    )
    results = tmp_path / "results"
    write_results(ablation, results, {("trace-a", "dense", 1): 0.5, ("trace-a", "sparse", 1): 0.5})
    words = f"--arms dense sparse exact_top_k --seeds 1 2 --results {results} --hours"
    # 7,100 s are used, a run takes 3,500 s, and two runs of seed 2 are reserved.
    experiment_of(ablation, tmp_path, f"{words} 4.8", "trace-a").run()
    assert started == [("dense", 2), ("sparse", 2)]
    assert "not enough time for exact_top_k, seed 1: 175 of 170 minutes" in capsys.readouterr().out
    started.clear()
    experiment_of(ablation, tmp_path, f"{words} 4.95", "trace-a").run()
    assert started[:1] == [("exact_top_k", 1)]


def test_scores_count_numbers_and_lines(ablation):
    problems = [{"answer": "Aa+1 1\nBa+1 2\nCa+1 3\nDa+1 4\n#### 04"}]

    def record(text):
        return {
            "group": "1",
            "loss_mask": [0] + [1] * (len(text) + 1),
            "input_ids": [81, *text.encode(), 258],
        }

    from trace_task import score_samples

    texts = [
        " Aa+1 1\nBa+1 2\nCa+1 3\nDa+1 4\n#### 04",
        " Aa+1 1\nBa+1 9\nCa+1 3\nDa+1 4\n#### 4",
        " Aa+1 1\n#### 14",
    ]
    scores = score_samples(problems, map(record, texts))
    assert scores["right"] == "2"
    assert scores["score"] == pytest.approx(2 / 3, abs=1e-4)
    assert scores["until_error"] == pytest.approx((1 + 1 / 4 + 1 / 4) / 3)
    assert scores["lines"] == pytest.approx((1 + 3 / 4 + 1 / 4) / 3, abs=1e-4)


def test_the_first_error_has_a_kind_and_a_place(ablation):
    from trace_errors import examine, first_error, table_row

    answer = "Ab+d 4+2=6 a9b6\nBc+5 1+5=6 a9b7\n#### 97"
    assert first_error(answer, " " + answer) is None
    assert first_error(answer, " Ab+c 4+2=6 a9b6") == ("step", 4)
    assert first_error(answer, " Ab+d 4+2=7 a9b6") == ("computation", 10)
    assert first_error(answer, answer.replace("a9b7", "a8b7")) == ("registers", 28)
    assert first_error(answer, answer.replace("97", "96")) == ("end", len(answer) - 1)
    assert first_error(answer, answer[:20]) == ("end", 20)
    assert first_error(answer, answer + "\n") is None
    wrong = {"answer": "a b\nc", "completion": "a d\nc", "token_mismatch": [0.5, 0, math.log(0.25), 0, 0, 0]}
    right = {"answer": "a b\nc", "completion": "a b\nc", "token_mismatch": [-1.0] * 6}
    row = table_row("7", [examine(wrong), examine(right)])
    assert row == "| 7 | 2 | 1 | 0 | 1 | 0 | 0 | 0.7500 | 0.1250 |"


def prompts_of_first_step(run):
    records = read_rollouts(run / "rollouts/step_1.jsonl.zst")
    return {bytes(record["input_ids"][: record["loss_mask"].index(1)]) for record in records}


def test_a_small_experiment_runs_to_the_tables_and_skips_finished_runs(bough):
    out, results = bough.cwd / "out", bough.cwd / "results"
    command = [sys.executable, str(BENCH / "sparse_ablation.py"), "--bough", str(bough.program)]
    command += ["--out", str(out), "--results", str(results)]
    command += shlex.split(
        "--arms dense distill_warmed --seeds 1 --steps 2 --phi-steps 1 --prompts 2 --threads 1"
    )
    command += shlex.split("--task registers=2 steps=[3,12] hidden_size=32 layers=2")
    command += shlex.split("--train-programs 20 --test-programs 3 --test-samples 2 --warm-programs 30")
    command += shlex.split("--lessons 1:2:4:3 2:4:4:3 --lesson-programs 30 --warm-steps 4")
    command += shlex.split("--sparse-settings rollout.sparse.budget=64 rollout.sparse.dense_layers=0")
    command += shlex.split("--settings gconfig.ignore_eos=true gconfig.max_new_tokens=110")
    command += ["reward=reward.py:score"]
    (bough.cwd / "reward.py").write_text(
        "def score(completion, **fields):\n    return float(sum(map(ord, completion)) % 3 == 0)\n"
    )

    def run():
        return run_experiment(command, bough.cwd, out)

    text = run()
    assert "dense, seed 1\nforecast after step" in text
    table = (out / "table.md").read_text()
    assert text.endswith(table)
    rows = [line for line in table.splitlines() if line.startswith(("| dense", "| distill_warmed", "| warm"))]
    assert len(rows) == 3
    assert (out / "curves.svg").read_text().count("<polyline") == 2
    (folder,) = results.iterdir()
    assert {path.name for path in folder.iterdir()} == {
        "warm.json", "dense-seed1.json", "distill_warmed-seed1.json",
    }  # fmt: skip
    warm = json.loads((folder / "warm.json").read_text())
    assert set(warm["seconds"]) == {"evaluation", "lesson1", "lesson2", "warm"}
    assert warm["made"] == warm["scored"] and warm["made"]["commit"]
    record = json.loads((folder / "distill_warmed-seed1.json").read_text())
    assert set(record["seconds"]) == {"phi", "train", "evaluation"}
    assert 0 < record["acceptance"] < 1.0001
    assert len(record["sparse"]["right"]) == 3
    prompts = [prompts_of_first_step(run) for run in sorted((out / "runs").glob("*-seed1"))]
    assert len(prompts) == 2 and prompts[0] == prompts[1]
    errors = [
        sys.executable,
        str(BENCH / "trace_errors.py"),
        str(out / "runs" / f"{folder.name}-dense-seed1"),
    ]
    rows = run_experiment(errors, bough.cwd, out).splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["1", "2", "all"]
    assert [row.split("|")[2].strip() for row in rows[2:]] == ["16", "16", "32"]
    # Equal rewards leave theta as it was, and phi learns.
    (phase,) = read_metrics(out / "runs" / f"{folder.name}-distill_warmed-seed1-phi")
    assert phase["optim/grad_norm"] == 0 < phase["sparse/grad_norm"]
    before = {
        path: path.stat().st_mtime_ns for path in (*out.rglob("*.safetensors"), *results.rglob("*.json"))
    }
    assert run() == table
    assert before == {path: path.stat().st_mtime_ns for path in before}
