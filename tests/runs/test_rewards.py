"""The rewards of docs/add_a_reward.md and docs/coming_from.md, exactly as written there, in whole
commands."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_util import ENVIRONMENT, read_metrics, write_experiment

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / document).read_text(), re.M | re.S)


@pytest.fixture
def examples(bough):
    """Writes the document's files, each named by its first line, and starts its endpoint. Gives the
    endpoint's port."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    names = []
    for block in blocks("add_a_reward.md", "python"):
        names.append(re.match(r"# (my_\w+\.py)\n", block)[1])
        (bough.cwd / names[-1]).write_text(block.replace("8000", str(port)))
    assert names == ["my_reward.py", "my_judge.py", "my_endpoint.py"]
    log = (bough.cwd / "endpoint.log").open("w")
    endpoint = subprocess.Popen([sys.executable, "my_endpoint.py"], cwd=bough.cwd, stderr=log)
    yield port
    endpoint.kill()
    endpoint.wait()
    log.close()


def test_a_run_adds_up_the_rewards_of_the_document(bough, examples):
    """Each reward source alone in an evaluation, and all of them in a run."""
    (list_of_rewards,) = blocks("add_a_reward.md", "yaml")
    config = write_experiment(bough, total_train_steps=2)
    settings = yaml.safe_dump(json.loads(config.read_text()))
    config.write_text(settings + list_of_rewards.replace("8000", str(examples)))
    bough("train", config, ok=True, env=ENVIRONMENT)
    records = read_metrics(bough.cwd / "runs/tiny/trial0")
    for record in records[1:]:
        assert record["reward/failures"] == 0
        # Brevity is above 0, the judge gives at least 0.5 and the endpoint 0.25.
        assert record["reward/mean"] > 0.2 * 0.5 + 0.5 * 0.25
    # 2 steps of 3 problems with 4 samples, and 2 evaluations of 12 problems.
    assert (bough.cwd / "endpoint.log").read_text().count("POST /score") == 2 * 3 * 4 + 2 * 12

    means = {}
    for reward in (
        "number",
        "my_reward.py:score",
        "my_reward.py:brevity",
        "{command: python3 my_judge.py}",
        f"http://127.0.0.1:{examples}/score",
        '[{verifier: number}, {function: "my_reward.py:brevity", weight: 0.1}]',
    ):
        result = bough(
            "eval", "--model", "base", "--data", "valid.jsonl", "--reward", reward, "--max-new-tokens", 8,
            "--json", ok=True, env=ENVIRONMENT,
        )  # fmt: skip
        assert result.json["reward_failures"] == 0, reward
        means[reward] = result.json["reward_mean"]
    number, own, brevity, judge, endpoint, both = means.values()
    assert number == own and 0 < brevity <= 1
    assert both == pytest.approx(number + 0.1 * brevity)
    assert 0.5 <= judge <= 1 and 0.25 <= endpoint <= 0.75


def test_functions_written_for_others_are_called_as_the_document_says(tmp_path):
    (adapters,) = blocks("coming_from.md", "python")
    (tmp_path / "my_reward.py").write_text(adapters)
    (tmp_path / "my_functions.py").write_text(
        "def verl_compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'gsm8k' and extra_info == {'level': 3}, (data_source, extra_info)\n"
        "    return {'score': float(solution_str == ground_truth), 'acc': 1}\n"
        "def trl_reward_func(prompts, completions, level, answer, **kwargs):\n"
        "    assert kwargs == {'data_source': ['gsm8k']}, kwargs\n"
        "    return [float(c == a) + l for c, a, l in zip(completions, answer, level, strict=True)]\n"
        "def areal_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):\n"
        "    return float(completions == answer and prompt == 'p' and kwargs['level'] == 3)\n"
    )
    calls = (
        "import my_reward\n"
        "fields = dict(prompt='p', completion='4', answer='4', level=3, data_source='gsm8k')\n"
        "assert my_reward.verl(**fields) == 1.0\n"
        "assert my_reward.trl(**fields) == 4.0\n"
        "assert my_reward.areal(**fields) == 1.0\n"
    )
    subprocess.run([sys.executable, "-c", calls], cwd=tmp_path, check=True)
