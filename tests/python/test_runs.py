"""bough.plan, train, rollout and serve: the program, started from Python. No torch is imported by them."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import bough
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def work(bough_program, tmp_path, monkeypatch):
    """A folder with a model and problems, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOUGH_BUILD_DIR", str(bough_program.parents[1]))
    for words in (
        "init base --hidden-size 32 --layers 2 --heads 2 --kv-heads 1",
        "data sums --out train.jsonl -n 20 --max-operand 9",
    ):
        subprocess.run([bough_program, *words.split()], check=True, capture_output=True)
    return tmp_path


SETTINGS = {
    "experiment_name": "python",
    "model": {"path": "base"},
    "train_dataset": {"path": "train.jsonl", "batch_size": 4},
    "gconfig": {"n_samples": 2, "max_new_tokens": 8},
    "total_train_steps": 3,
}


def test_train_calls_reward_and_on_step_in_this_process(work, capfd):
    steps, completions = [], []

    def reward(completion, answer):
        completions.append((completion, answer))
        return len(completion)

    result = bough.train(
        SETTINGS, {"actor.optimizer.lr": 1e-4}, on_step=lambda m: steps.append(m["step"]), reward=reward
    )
    assert steps == [1, 2, 3] == [m["step"] for m in result.metrics]
    assert len(completions) == 24 and all(answer for _, answer in completions)
    assert result.folder == Path("runs/python/trial0") and (result.model / "config.json").exists()
    mean = sum(len(c) for c, _ in completions) / len(completions)
    assert sum(m["reward/mean"] for m in result.metrics) / 3 == pytest.approx(mean, rel=1e-5)
    assert "actor.optimizer.lr" in capfd.readouterr().err


def test_train_reads_a_file_and_a_run_goes_on(work):
    (work / "run.yaml").write_text(json.dumps(SETTINGS))
    steps = []
    first = bough.train("run.yaml", ["total_train_steps=40"], on_step=lambda m: len(m) < 0, quiet=True)
    assert 1 <= len(first.metrics) < 40, "on_step returned False"
    second = bough.train(
        "run.yaml", ["total_train_steps=40"], on_step=lambda m: steps.append(m["step"]), quiet=True
    )
    assert [m["step"] for m in second.metrics] == list(range(1, 41)) and steps[-1] == 40


@pytest.mark.parametrize("raiser", ["reward", "on_step"])
def test_exceptions_of_callables_come_back(work, raiser):
    def raises(*args, **fields):
        raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        bough.train({**SETTINGS, "total_train_steps": 1000}, quiet=True, **{raiser: raises})


def test_errors_of_the_program_are_exceptions(work):
    with pytest.raises(bough.ProgramError, match=r"exit code 2: .*unknown setting 'nonsense'") as caught:
        bough.train({**SETTINGS, "nonsense": 1}, quiet=True)
    assert caught.value.code == 2
    with pytest.raises(bough.ProgramError, match="exit code 2"):
        bough.rollout("missing", ["1+1="])
    with pytest.raises(bough.ProgramError, match="exit code 2"):
        bough.serve("missing")


def test_rollout_and_serve(work):
    rollouts = bough.rollout("base", ["1+1=", [5, 6], {"prompt": "2+"}], n_samples=2, max_new_tokens=4)
    assert len(rollouts) == 6
    assert all(len(r["input_ids"]) == len(r["loss_mask"]) == len(r["logprobs"]) for r in rollouts)
    with bough.serve("base") as server, urllib.request.urlopen(server.url + "/v1/models") as answer:
        assert json.load(answer)["data"]
    with pytest.raises(OSError):
        urllib.request.urlopen(server.url + "/v1/models")


class TestPlan:
    PAIRS = (([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4], [7]), ([1, 2, 3, 4], [7, 8]))

    def forms(self, folder):
        import numpy
        import pyarrow
        import pyarrow.parquet

        dicts = [{"prompt_ids": prompt, "completion_ids": response} for prompt, response in self.PAIRS]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(dicts), folder / "rollouts.parquet")
        prompts = numpy.array([[0, *prompt] for prompt, _ in self.PAIRS])
        completions = numpy.array([(response + [0, 0])[:2] for _, response in self.PAIRS])
        trl = {
            "prompt_ids": prompts,
            "prompt_mask": prompts != 0,
            "completion_ids": completions,
            "completion_mask": completions != 0,
        }
        both = numpy.concatenate([prompts, completions], axis=1)
        batch = {"input_ids": both, "attention_mask": both != 0, "responses": completions}
        verl = type("DataProto", (), {"batch": batch, "non_tensor_batch": {}})()
        texts = [(" ".join(map(str, p)), " ".join(map(str, r))) for p, r in self.PAIRS]
        return {
            "pairs": list(self.PAIRS),
            "parquet": folder / "rollouts.parquet",
            "trl": trl,
            "verl": verl,
            "texts": texts,
        }

    @pytest.mark.parametrize("form", ["pairs", "parquet", "trl", "verl", "texts"])
    def test_reads_every_form(self, work, form):
        def tokenizer(text, add_special_tokens):
            return {"input_ids": [int(word) for word in text.split()]}

        report = bough.plan(self.forms(work)[form], device="h100", model="qwen3-4b", tokenizer=tokenizer)
        assert (report.data["tokens"], report.data["tree_tokens"]) == (17, 8)
        assert "8 of 17 tokens are computed" in str(report).splitlines()[0]
        assert report._repr_html_().count("<svg") == 1

    def test_takes_the_shape_of_a_transformers_model(self, work):
        from tiny_models import make_tiny_model

        model = make_tiny_model("qwen3")
        for given in (model, model.config, "base"):
            text = str(bough.plan(list(self.PAIRS), model=given, device="h100"))
            assert "qwen3-0.6b" not in text and "tree tokens" in text

    @pytest.mark.parametrize(
        ("rollouts", "message"),
        [
            (["a text"], r"rollout 0: got a text, expected token ids, or the argument `tokenizer`"),
            ([3], r"rollout 0: got int, expected token ids"),
            ([{"tokens": [1]}], r"rollout 0: got the keys tokens, expected input_ids"),
            ({"prompt_ids": []}, r"got a mapping without prompt_mask, completion_ids, completion_mask"),
        ],
    )
    def test_other_input_is_refused(self, work, rollouts, message):
        with pytest.raises(ValueError, match=message):
            bough.plan(rollouts, device="h100")


def test_runs_and_plans_import_no_torch(work):
    code = "import bough, sys; bough.plan([([1, 2], [3])], device='h100'); print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
