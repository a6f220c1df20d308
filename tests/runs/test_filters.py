"""Runs with filters that refuse groups. Other groups are generated until the batch is full or the limit is
reached."""

import re
from pathlib import Path

import pytest
from run_util import (
    ENVIRONMENT,
    comparable_metrics,
    final_state,
    read_metrics,
    read_rollouts,
    write_experiment,
)
from test_train import trained_groups

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/add_a_filter.md"

# Rewards that differ between a tiny model's samples. About half of the groups of two samples have equal
# rewards.
PARITY = "def score(completion):\n    return sum(map(ord, completion)) % 2\n"
HALF = {
    "reward": "parity.py:score",
    "gconfig.n_samples": 2,
    "total_train_steps": 5,
    "evaluator.freq_steps": 0,
}


@pytest.fixture
def parity(bough):
    (bough.cwd / "parity.py").write_text(PARITY)
    return HALF


@pytest.mark.parametrize("eta", [0, 2])
def test_dynamic_sampling_fills_every_batch(bough, parity, eta):
    config = write_experiment(
        bough, **parity, **{"actor.dynamic_sampling": True, "rollout.max_head_offpolicyness": eta}
    )
    folders = [bough.cwd / "runs/tiny" / name for name in ("first", "second")]
    for folder in folders[: 2 if eta == 0 else 1]:
        bough("train", config, f"trial_name={folder.name}", ok=True, env=ENVIRONMENT)
    records = read_metrics(folders[0])[1:]
    assert [record["rollout/batch_groups"] for record in records] == [3] * 5
    refused = sum(record.get("refused/equal_rewards", 0) for record in records)
    assert refused == sum(record["rollout/groups_refused"] for record in records) > 0
    for step in range(1, 6):
        rewards = {}
        for row in read_rollouts(folders[0] / f"rollouts/step_{step}.jsonl.zst"):
            rewards.setdefault(row["group"], set()).add(row["reward"])
        assert list(rewards.values()) == [{0, 1}] * 3
    groups = trained_groups(folders[0])
    assert len(groups) == 15
    if eta == 0:
        assert comparable_metrics(folders[0]) == comparable_metrics(folders[1])
        assert final_state(folders[0]) == final_state(folders[1])


def test_a_filter_that_refuses_nothing_changes_nothing(bough, parity):
    """If no group is refused, the setting alone changes nothing."""
    (bough.cwd / "filter.py").write_text("def keep(samples):\n    return True\n")
    config = write_experiment(bough, **parity)
    bough("train", config, "trial_name=without", ok=True, env=ENVIRONMENT)
    bough("train", config, "trial_name=with", "filter=filter.py:keep", ok=True, env=ENVIRONMENT)
    first, second = (bough.cwd / "runs/tiny" / name for name in ("without", "with"))
    assert comparable_metrics(first) == comparable_metrics(second)
    models = [
        {name: data for name, data in final_state(run).items() if name.endswith("safetensors")}
        for run in (first, second)
    ]
    assert models[0] and models[0] == models[1]


def test_the_documents_filter_in_a_run(bough, parity):
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)
    (bough.cwd / "my_filter.py").write_text(code)
    name = "my_filter.py:neither_trivial_nor_hopeless"
    config = write_experiment(bough, **parity, filter=name)
    bough("train", config, ok=True, env=ENVIRONMENT)
    records = read_metrics(bough.cwd / "runs/tiny/trial0")[1:]
    assert [record["rollout/batch_groups"] for record in records] == [3] * 5
    assert sum(record.get("refused/filter", 0) for record in records) > 0


def test_a_run_ends_with_a_message_if_filters_refuse_everything(bough, parity):
    (bough.cwd / "filter.py").write_text("def keep(samples):\n    return False\n")
    config = write_experiment(bough, **parity, **{"filter": "filter.py:keep", "actor.max_num_gen_batches": 2})
    ended = bough("train", config, env=ENVIRONMENT)
    assert ended.returncode == 3, str(ended)
    assert "filters refused all of 6 groups" in ended.stderr and "max_num_gen_batches" in ended.stderr
    (bough.cwd / "filter.py").write_text("def keep(samples):\n    return len(samples) == 3\n    yield\n")
    broken = bough("train", config, "trial_name=broken", "reward_service.max_consecutive_failures=4",
                   env=ENVIRONMENT)  # fmt: skip
    assert broken.returncode == 3, str(broken)
    assert "filter" in broken.stderr and "expected a number" in broken.stderr


def test_a_filter_that_is_not_there_is_refused_by_name(bough):
    config = write_experiment(bough)
    refused = bough("train", config, "filter=nowhere.py:keep", env=ENVIRONMENT)
    assert refused.returncode == 2 and "filter" in refused.stderr and "nowhere.py" in refused.stderr
