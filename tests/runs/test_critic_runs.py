"""Whole runs of `bough train` with a critic: repeatable, resumed bit for bit, and asynchronous."""

import json
import time

import pytest
from run_util import (
    ENVIRONMENT,
    comparable_metrics,
    final_state,
    last_checkpoint,
    read_metrics,
    read_rollouts,
    write_experiment,
)

SETTINGS = {
    "actor.adv_estimator": "gae",
    "actor.gae_lambda": 0.9,
    "actor.ppo_n_minibatches": 2,
    "actor.ppo_epochs": 2,
    "critic.optimizer.lr": 1e-3,
    "critic.warmup_steps": 2,
    "saver.freq_steps": 1,
    "reward": "reward.py:score",
    "evaluator.at_start": False,
    "evaluator.at_end": False,
    "evaluator.freq_steps": 0,
}

# The rewards of samples must differ.
REWARD = "def score(completion, **fields):\n    return float(sum(map(ord, completion)) % 3 == 0)\n"


def experiment(bough, **settings):
    (bough.cwd / "reward.py").write_text(REWARD)
    return write_experiment(bough, **SETTINGS, **settings)


def test_an_adapter_with_a_shared_critic_and_a_kl_in_the_reward(bough):
    """The adapter is trained by policy and critic, and the rewards of tokens include the KL. One process and
    two ranks agree, and a resumed run ends with the same state."""
    config = experiment(
        bough,
        **{
            "critic.share_backbone": True,
            "lora.rank": 4,
            "actor.kl_ctl": 0.1,
            "actor.optimizer.lr": 0.01,
            "total_train_steps": 5,
        },
    )
    runs = bough.cwd / "runs/tiny"
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    bough("train", config, "trial_name=parts", "total_train_steps=3", ok=True, env=ENVIRONMENT)
    bough("train", config, "trial_name=parts", ok=True, env=ENVIRONMENT)
    state = final_state(runs / "whole")
    assert state == final_state(runs / "parts")
    assert "adapter/adapter_model.safetensors" in state and "critic/value_head.safetensors" in state
    records = read_metrics(runs / "whole")
    # During the critic's warm-up the policy is the reference.
    assert [record["kl_ctl/kl"] == 0 for record in records] == [True] * 3 + [False] * 2
    rows = read_rollouts(runs / "whole/rollouts/step_5.jsonl.zst")
    assert any(any(row["kl_rewards"]) for row in rows)
    bough("train", config, "trial_name=ranks", "--ranks", 2, ok=True, env=ENVIRONMENT)
    for record, other in zip(records, read_metrics(runs / "ranks"), strict=True):
        assert other["kl_ctl/kl"] == pytest.approx(record["kl_ctl/kl"], abs=1e-4)


@pytest.mark.parametrize("share_backbone", [False, True])
def test_a_killed_run_ends_with_the_same_actor_and_critic(bough, share_backbone):
    config = experiment(bough, **{"critic.share_backbone": share_backbone, "total_train_steps": 8})
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    whole, killed = bough.cwd / "runs/tiny/whole", bough.cwd / "runs/tiny/killed"
    for steps in (1, 4):  # during the critic's warm-up, and after it
        process = bough.start("train", config, "trial_name=killed", env=ENVIRONMENT)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if (killed / "metrics.jsonl").exists() and len(read_metrics(killed)) > steps:
                break
            time.sleep(0.005)
        process.kill()
        process.communicate()
    bough("train", config, "trial_name=killed", ok=True, env=ENVIRONMENT)
    state = final_state(whole)
    assert state == final_state(killed)
    assert comparable_metrics(whole) == comparable_metrics(killed)
    saved = {name for name in state if name.startswith("critic/")}
    expected = {"critic/optimizer.safetensors", "critic/value_head.safetensors"}
    if not share_backbone:
        expected |= {"critic/model/model.safetensors", "critic/model/config.json"}
    assert saved == expected
    records = read_metrics(whole)
    assert ["optim/grad_norm" in record for record in records] == [False] * 2 + [True] * 6
    names = ("loss", "value_mean", "return_mean", "explained_variance", "clip_fraction", "grad_norm", "lr")
    for record in records:
        assert {f"critic/{name}" for name in names} <= record.keys()
        assert record["critic/grad_norm"] > 0 and record["memory/predicted"] > 0
    assert records[0]["critic/value_mean"] == 0 and records[-1]["critic/value_mean"] != 0


def test_another_run_begins_with_the_critic_of_one(bough):
    config = experiment(bough, **{"total_train_steps": 3})
    bough("train", config, "trial_name=first", ok=True, env=ENVIRONMENT)
    critic = last_checkpoint(bough.cwd / "runs/tiny/first") / "critic"
    bough("train", config, "trial_name=next", f"critic.path={critic}", ok=True, env=ENVIRONMENT)
    records = read_metrics(bough.cwd / "runs/tiny/next")
    assert records[0]["critic/value_mean"] != 0
    # A step's rollouts store the values that it was trained on. `bough step` computes advantages from these
    # values.
    rollouts = bough.cwd / "runs/tiny/next/rollouts/step_1.jsonl.zst"
    arguments = ("step", "--model", "base", "--rollouts", rollouts, "--from-rewards", "--json")
    losses = {
        bough(*arguments, f"actor.adv_estimator={name}", ok=True, env=ENVIRONMENT).json["loss"]
        for name in ("gae", "grpo")
    }
    assert len(losses) == 2


@pytest.mark.parametrize("share_backbone", [False, True])
def test_a_critic_learns_beside_generation(bough, share_backbone):
    config = experiment(bough, **{"critic.share_backbone": share_backbone})
    bough("train", config, "rollout.max_head_offpolicyness=2", ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    records = read_metrics(run)
    assert [record["step"] for record in records] == list(range(1, 8))
    assert records[-1]["critic/value_mean"] != 0 and records[-1]["optim/grad_norm"] > 0
    assert (last_checkpoint(run) / "critic/value_head.safetensors").stat().st_size > 0


def test_memory_counts_what_the_critic_holds(bough):
    config = experiment(bough, **{"total_train_steps": 3})
    bough("train", config, ok=True, env=ENVIRONMENT)
    needed = read_metrics(bough.cwd / "runs/tiny/trial0")[-1]["memory/predicted"]
    # This budget holds the actor's passes only. The critic's weights leave nothing of it.
    small, own = "actor.mb_spec.memory=300KiB", "critic.share_backbone=false"
    refused = bough("train", config, "trial_name=small", small, own, env=ENVIRONMENT)
    assert refused.returncode == 2
    assert "critic" in refused.stderr and "actor.mb_spec.memory" in refused.stderr
    enough = f"actor.mb_spec.memory={int(needed * 1.5)}"
    bough("train", config, "trial_name=enough", enough, own, ok=True, env=ENVIRONMENT)
    records = read_metrics(bough.cwd / "runs/tiny/enough")
    assert all(record["memory/predicted"] <= needed * 1.5 for record in records)
    # If share_backbone is not set, memory decides: the critic shares the actor's backbone when its own does
    # not fit. A resumed run keeps this choice.
    for steps in (2, 3):
        arguments = ("trial_name=shared", f"total_train_steps={steps}", small)
        done = bough("train", config, *arguments, ok=True, env=ENVIRONMENT)
        assert ("memory is too small for a second model" in done.stderr) == (steps == 2)
    shared = last_checkpoint(bough.cwd / "runs/tiny/shared") / "critic"
    assert (shared / "value_head.safetensors").exists() and not (shared / "model").exists()


BAD = {
    "a critic without gae": (["actor.adv_estimator=grpo", "critic.share_backbone=true"], ["critic", "gae"]),
    "two backbones": (["critic.share_backbone=true", "critic.path=base"], ["share_backbone", "critic.path"]),
    "another vocabulary": (["critic.path=other"], ["critic.path", "280", "token ids"]),
    "no such critic": (["critic.path=nowhere"], ["nowhere"]),
    "norm without gae": (["actor.adv_estimator=grpo", "actor.adv_norm.std_level=none"], ["adv_norm"]),
    "one update": (["actor.prox_logp_method=reuse_train_logp"], ["ppo_epochs", "ppo_n_minibatches"]),
}


@pytest.mark.parametrize("name", BAD)
def test_contradictions_are_refused_by_name(bough, name):
    overrides, words = BAD[name]
    config = experiment(bough)
    if name == "another vocabulary":
        bough("init", "other", "--hidden-size", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1, ok=True)
        file = bough.cwd / "other/config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 280}))
    result = bough("train", config, *overrides, env=ENVIRONMENT)
    assert result.returncode == 2, result.stderr
    for word in words:
        assert word in result.stderr, (word, result.stderr)
