"""Whole runs of `bough train` with a teacher, OBRS, a reference that is renewed, and coefficients that
adapt."""

import json
import math

import pytest
from run_util import ENVIRONMENT, comparable_metrics, final_state, read_metrics, write_experiment

SMALL = {"evaluator.at_start": False, "evaluator.at_end": False, "evaluator.freq_steps": 0}
SIZES = ("--hidden-size", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1)


def experiment(bough, **settings):
    config = write_experiment(bough, **SMALL, **settings)
    bough("init", "teacher", *SIZES, "--seed", 2, ok=True)
    return config


@pytest.mark.parametrize("mode", ["k1", "k2", "topk"])
def test_the_policy_comes_nearer_to_its_teacher(bough, mode):
    settings = {"teacher.path": "teacher", "teacher.rl_loss_weight": 0, "teacher.loss_mode": mode}
    settings |= {"actor.loss": "pg", "total_train_steps": 12, "actor.optimizer.lr": 5e-3}
    settings |= {"train_dataset.batch_size": 12, "gconfig.ignore_eos": True}
    config = experiment(bough, **settings)
    bough("train", config, ok=True, env=ENVIRONMENT)
    kl = [record["teacher/kl_k3"] for record in read_metrics(bough.cwd / "runs/tiny/trial0")]
    assert sum(kl[-3:]) < 0.8 * sum(kl[:3]), kl


def test_obrs_takes_the_engines_most_likely_tokens(bough):
    config = experiment(bough, **{"actor.correction": "obrs", "gconfig.top_logprobs": 5})
    bough("train", config, "total_train_steps=2", ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    for record in read_metrics(run):
        # Engine and trainer have the same policy here, so everything is accepted with a weight of 1.
        assert record["mismatch/obrs_acceptance"] == pytest.approx(1, abs=1e-4)
        assert record["mismatch/obrs_accepted"] > 0.99
        assert record["mismatch/factor_mean"] == pytest.approx(1, abs=1e-3)
        assert 0 < record["mismatch/obrs_topk_error"] < 1
    refused = bough("train", config, "gconfig.top_logprobs=0", "trial_name=none")
    assert refused.returncode != 0 and "gconfig.top_logprobs" in refused.stderr
    refused = bough("train", config, "gconfig.top_p=0.9", "trial_name=cut")
    assert refused.returncode != 0 and "top_p" in refused.stderr


def test_the_kl_to_the_reference_over_the_top_tokens_is_near_its_estimate(bough):
    """With as many top tokens as the vocabulary has, the KL is that of the whole distributions."""
    reward = "def score(completion, **fields):\n    return sum(map(ord, completion)) % 1000 / 1000\n"
    (bough.cwd / "reward.py").write_text(reward)
    settings = {"actor.kl_loss_coef": 0.1, "gconfig.top_logprobs": 400, "gconfig.n_samples": 16}
    config = experiment(bough, reward="reward.py:score", **settings)
    kl = {}
    for kind in ("k2", "topk"):
        words = (f"actor.kl_loss_type={kind}", f"trial_name={kind}", "total_train_steps=2")
        bough("train", config, *words, ok=True, env=ENVIRONMENT)
        # At the first step the policy is its reference, so both runs have the same policy at the second one.
        first, second = read_metrics(bough.cwd / f"runs/tiny/{kind}")
        assert first["loss/kl"] == pytest.approx(0, abs=1e-6)
        kl[kind] = second["loss/kl"]
    assert kl["topk"] == pytest.approx(kl["k2"], rel=0.5) and kl["topk"] > 1e-6


def test_a_resumed_run_has_the_same_reference_and_coefficients(bough):
    settings = {
        "actor.kl_ctl": 0.05,
        "actor.kl_ctrl.type": "adaptive",
        "actor.kl_ctrl.target_kl": 0.01,
        "actor.kl_ctrl.horizon": 100,
        "actor.ref_model_sync_steps": 3,
        "actor.ref_model_mixup_alpha": 0.5,
        "actor.target_entropy": 10,
        "actor.kl_loss_coef": 0.01,
        "actor.kl_loss_type": "unbiased",
        "actor.ppo_n_minibatches": 2,
        "teacher.path": "teacher",
        "teacher.distill_loss_weight": 0.01,
        "saver.freq_steps": 1,
        "actor.optimizer.warmup_steps_proportion": 0,  # a share of total_train_steps, which differ below
        "total_train_steps": 8,
    }
    config = experiment(bough, **settings)
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    for steps in (2, 4, 8):
        bough("train", config, "trial_name=parts", f"total_train_steps={steps}", ok=True, env=ENVIRONMENT)
    whole, parts = bough.cwd / "runs/tiny/whole", bough.cwd / "runs/tiny/parts"
    state = final_state(whole)
    assert state == final_state(parts)
    assert "reference/model.safetensors" in state
    assert state["reference/model.safetensors"] != state["model/model.safetensors"]
    assert comparable_metrics(whole) == comparable_metrics(parts)
    records = read_metrics(whole)
    assert [record["policy/reference_renewed"] for record in records] == [0, 0, 1, 0, 0, 1, 0, 0]
    coefficients = [record["kl_ctl/coef"] for record in records]
    assert coefficients[0] == 0.05 and len(set(coefficients)) > 4
    bonus = [record["policy/entropy_coef"] for record in records]
    assert bonus == pytest.approx([0.005 * i for i in range(8)])
    assert records[0]["kl_ctl/kl"] == pytest.approx(0, abs=1e-6) and records[2]["kl_ctl/kl"] != 0
    saved = json.loads(state["state.json"])["state"]["coefficients"]
    assert math.isfinite(saved["kl_ctl"]) and saved["entropy_coef"] == pytest.approx(0.04)


def test_a_teacher_of_another_vocabulary_is_refused(bough):
    config = experiment(bough, **{"teacher.path": "teacher"})
    tokenizer = bough.cwd / "teacher/tokenizer.json"
    data = json.loads(tokenizer.read_text())
    vocabulary = data["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer.write_text(json.dumps(data))
    refused = bough("train", config)
    assert refused.returncode != 0 and "another vocabulary" in refused.stderr
