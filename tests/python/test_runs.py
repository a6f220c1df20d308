"""bough.plan, train, rollout and serve: the program, started from Python. No torch is imported by them."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import bough
import pytest
from bough.callables import Conversations

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


def test_a_run_with_callables_goes_on_in_another_process(work):
    """The endpoint of the functions has another port then."""
    functions = {"reward": lambda completion: len(completion), "environment": Echo}
    steps = []
    bough.train(SETTINGS, ["total_train_steps=1"], quiet=True, **functions)
    result = bough.train(SETTINGS, quiet=True, on_step=lambda m: steps.append(m["step"]), **functions)
    assert steps == [1, 2, 3] and len(result.metrics) == 3


class Echo:
    """Three turns. Each answer takes a while, so conversations overlap."""

    made = []

    def __init__(self):
        self.turns, self.is_closed = 0, False
        Echo.made.append(self)

    def reset(self, problem, seed):
        self.answer = problem["answer"]
        return {"messages": "say " + self.answer}

    async def step(self, action):
        self.loop = asyncio.get_running_loop()
        self.begin = time.monotonic()
        self.turns += 1
        await asyncio.sleep(0.05)
        self.end = time.monotonic()
        return "go on", len(action["text"]) / 2, self.turns == 3

    def close(self):
        self.is_closed = True


@pytest.fixture(scope="module")
def warm_model(bough_program, tmp_path_factory):
    """A model that has learnt to end a turn."""
    folder = tmp_path_factory.mktemp("warm")
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # passes are short
    for words in (
        "init base --hidden-size 32 --layers 2 --heads 2 --kv-heads 1",
        "data guess --out traces.jsonl -n 60 --traces",
        "sft --model base --data traces.jsonl --out warm --max-steps 60 --lr 1e-2",
    ):
        command = [bough_program, *words.split()]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, env=one_thread)
    return folder / "warm"


@pytest.fixture
def talks(work, warm_model):
    """Settings of runs with conversations."""
    Echo.made.clear()
    Path("warm").symlink_to(warm_model)
    return {**SETTINGS, "model": {"path": "warm"}, "total_train_steps": 2}


def test_an_environment_of_this_process_answers_the_turns(talks):
    result = bough.train(talks, environment=Echo, quiet=True)
    assert [m["step"] for m in result.metrics] == [1, 2]
    assert len(Echo.made) == 16, "4 problems, 2 samples, 2 steps"
    assert max(each.turns for each in Echo.made) == 3 and all(each.is_closed for each in Echo.made)
    assert result.metrics[0]["conversation/turns_mean"] > 1
    assert any(m["reward/mean"] > 0 for m in result.metrics)
    assert len({each.loop for each in Echo.made}) == 1, "conversations cannot share clients"
    spans = sorted((each.begin, each.end) for each in Echo.made)
    assert any(end > begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)), "one at a time"


def test_rollout_samples_conversations(talks):
    problems = [{"question": "1+1=", "answer": "2"}, {"question": "2+2=", "answer": "4"}]
    settings = {"max_turns": 2}
    rollouts = bough.rollout(
        "warm", problems, environment=lambda: Echo(), environment_settings=settings, max_new_tokens=8
    )
    assert {each["conversation"]["turns"] for each in rollouts} <= {1, 2} and len(Echo.made) == 2
    assert sorted(each.answer for each in Echo.made) == ["2", "4"]
    built_in = bough.rollout("warm", "train.jsonl", environment="guess", max_new_tokens=4)
    assert len(built_in) >= 20


@pytest.mark.parametrize("method", ["__init__", "reset", "step", "close"])
def test_an_exception_of_an_environment_comes_back(talks, method):
    def raises(self, *arguments):
        raise KeyError(f"in {method}")

    broken = type("Broken", (Echo,), {method: raises})
    with pytest.raises(KeyError, match=f"in {method}"):
        bough.train({**talks, "total_train_steps": 1000}, environment=broken, quiet=True)
    with pytest.raises(KeyError, match=f"in {method}"):
        bough.rollout("warm", [{"question": "1", "answer": "2"}], environment=broken, max_new_tokens=4)


@pytest.mark.parametrize("error", [None, KeyError("of a step")])
def test_open_conversations_are_closed_at_the_end_of_a_run(error):
    class Fails(Echo):
        def close(self):
            self.is_closed = True
            raise RuntimeError("in close")

    Echo.made.clear()
    with pytest.raises(KeyError if error else RuntimeError), Conversations(Fails) as conversations:
        for episode in ("a", "b"):
            request = {"episode": episode, "method": "reset", "problem": {"answer": "1"}, "seed": 7}
            conversations.answer(request)
        if error:
            raise error
    assert [each.is_closed for each in Echo.made] == [True, True]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3, "Wrong.step: got 3, expected a dict with some of messages, reward, done, rewards, invalid_calls"),
        ({"rewrd": 1}, "Wrong.step: got the key 'rewrd', expected a dict with some of messages"),
        ({"messages": 1}, "Wrong.step: messages: got 1, expected str or list"),
        ({"reward": "high"}, "Wrong.step: reward: got 'high', expected a finite number"),
        ({"rewards": {"style": float("nan")}}, "rewards['style']: got nan, expected a finite number"),
        ({"done": 1}, "Wrong.step: done: got 1, expected bool"),
    ],
)
def test_a_wrong_result_of_an_environment_is_named(result, message):
    class Wrong(Echo):
        def step(self, action):
            return result

    with Conversations(Wrong) as conversations:
        conversations.answer({"episode": "a", "method": "reset", "problem": {"answer": "1"}, "seed": 7})
        with pytest.raises(TypeError, match=re.escape(message)):
            conversations.answer({"episode": "a", "method": "step", "action": {"text": ""}})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Echo(), "expected a class with reset and step, or a function that makes such an object"),
        (dict, "has no method 'reset'"),
        ("Echo", "got 'Echo', expected a class"),
    ],
)
def test_what_is_no_environment_is_refused_before_the_run(work, environment, message):
    with pytest.raises(TypeError, match=message):
        bough.train(SETTINGS, environment=environment)
    assert not Path("runs").exists()


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
