"""Whole runs that generate with sparse attention: the modes of sparse_training, and a killed run that is
resumed."""

import json
import os
import signal
import subprocess

import pytest
from run_util import ENVIRONMENT, comparable_metrics, final_state, read_metrics, write_experiment
from test_train import wait_for_steps

SPARSE = {
    "rollout.sparse.budget": "16x4",
    "rollout.sparse.dense_layers": 1,
    "gconfig.max_new_tokens": 120,
    "gconfig.ignore_eos": True,
    "evaluator.freq_steps": 0,
    "evaluator.at_start": False,
    "evaluator.at_end": False,
}
DISTILL = {
    **SPARSE,
    "sparse_training.mode": "distill",
    "sparse_training.kl_loss_coef": 0.1,
    "sparse_training.lora.rank": 4,
}


# A draft policy generates with dense attention.
DRAFT = {
    **{key: value for key, value in SPARSE.items() if "sparse" not in key},
    "sparse_training.mode": "draft",
    "sparse_training.draft_path": "weak",
    "sparse_training.kl_loss_coef": 0.1,
    "sparse_training.kl_loss_type": "topk",
    "gconfig.max_new_tokens": 24,
    "gconfig.top_logprobs": 20,
    "actor.correction": "obrs",
}


def init_draft(bough, *options):
    sizes = ("--hidden-size", 16, "--layers", 1, "--heads", 2, "--kv-heads", 1, "--seed", 2)
    bough("init", "weak", *sizes, *options, ok=True)


def test_each_mode_trains_the_expected_policy(bough):
    config = write_experiment(bough, **SPARSE, total_train_steps=3)
    runs = bough.cwd / "runs/tiny"
    more = {
        "exact_top_k": ["rollout.sparse.summary=exact"],
        "sparse_to_sparse": ["rollout.sparse.replay=true", "rollout.sparse.budget=[16x4, 100:16x5]"],
    }
    for mode in ("sparse", "exact_top_k", "distill", "sparse_to_sparse"):
        arguments = [f"sparse_training.mode={mode}", f"trial_name={mode}", *more.get(mode, [])]
        bough("train", config, *arguments, ok=True, env=ENVIRONMENT)
        records = read_metrics(runs / mode)
        assert len(records) == 3
        assert all(record["rollout/active_pages"] < 1 for record in records)
        mismatch = [record["mismatch/logprob_abs_diff"] for record in records]
        if mode == "sparse_to_sparse":  # the trained policy is the policy that generates
            assert max(mismatch) < 1e-4
        else:
            assert min(mismatch) > (1e-6 if mode == "exact_top_k" else 1e-4)
        assert all(("sparse/acceptance" in record) == (mode != "sparse_to_sparse") for record in records)
        assert all(("sparse/kl" in record) == (mode == "distill") for record in records)
        assert not any("sparse/factor_mean" in record for record in records)  # a synchronous run
        if "rollout.sparse.replay=true" in arguments:
            assert all(record["sparse/replayed"] > 0.9 for record in records)
    assert (runs / "distill/checkpoints/step_3/sparse_adapter/adapter_model.safetensors").exists()
    # The policy that generated is exported like any adapter.
    step = runs / "distill/checkpoints/step_3"
    bough("merge", step / "model", step / "sparse_adapter", "both", ok=True)


def test_kl_over_the_top_tokens_is_near_its_estimate(bough):
    """The KL over all tokens of the vocabulary, and k2 on the sampled tokens, of the same policies."""
    config = write_experiment(bough, **SPARSE, total_train_steps=1)
    options = ("sparse_training.mode=distill", "sparse_training.kl_loss_coef=1", "gconfig.n_samples=8")
    # phi's step sees theta after theta's step, which moves the sampled tokens more than others: a small rate.
    options += ("gconfig.top_logprobs=400", "actor.optimizer.lr=1e-9")
    seen = {}
    for kind in ("k2", "topk"):
        for batches in (1, 2):
            words = (f"sparse_training.kl_loss_type={kind}", f"actor.ppo_n_minibatches={batches}")
            bough("train", config, *options, *words, f"trial_name={kind}{batches}", ok=True, env=ENVIRONMENT)
            (seen[kind, batches],) = read_metrics(bough.cwd / f"runs/tiny/{kind}{batches}")
    assert seen["topk", 1]["sparse/kl"] == pytest.approx(seen["k2", 1]["sparse/kl"], rel=1e-4)
    for batches in (1, 2):
        assert seen["topk", batches]["sparse/kl_loss"] == pytest.approx(
            seen["k2", batches]["sparse/kl_loss"], rel=0.2
        )
    topk = ("sparse_training.kl_loss_type=topk", "actor.kl_loss_type=topk", "trial_name=refused")
    for refused, key in (
        (("gconfig.top_logprobs=0", "actor.correction=tis"), "gconfig.top_logprobs"),
        (("gconfig.top_logprobs=0", "actor.correction=tis", "actor.kl_loss_coef=0.1"), "actor.kl_loss_type"),
        (("teacher.path=base", "teacher.loss_mode=topk", "actor.correction=tis"), "teacher.loss_mode"),
    ):
        done = bough("train", config, *options, *topk, *refused, env=ENVIRONMENT)
        assert done.returncode == 2 and key in done.stderr, done.stderr


# Evaluations whose rewards depend on every token.
EVALUATED = {"evaluator.at_start": True, "evaluator.at_end": True, "evaluator.n_samples": 2}
EVALUATED |= {"evaluator.temperature": 1.0, "reward": "reward.py:score"}
REWARD = "def score(completion, **fields):\n    return sum(map(ord, completion)) % 1000 / 1000\n"
POLICY = ("rollout.sparse.budget=16x4", "rollout.sparse.dense_layers=1")


def evaluate_alone(bough, model, *options):
    """The metrics of `bough eval`, as EVALUATED has them in a run."""
    data = ("--data", "valid.jsonl", "--reward", "reward.py:score", "--json")
    sampling = ("--k", 2, "--temperature", 1.0, "--max-new-tokens", 120, "--seed", 1)
    dtype = ("--dtype", "fp64")
    return bough("eval", "--model", model, *data, *sampling, *dtype, *options, ok=True, env=ENVIRONMENT).json


def assert_evaluated(record, name, expected):
    for metric in ("avg_at_k", "pass_at_k", "reward_mean", "length_mean", "truncated_fraction"):
        assert record[f"{name}/{metric}"] == expected[metric], (name, metric)


@pytest.mark.parametrize("mode", ["sparse", "exact_top_k", "distill", "sparse_to_sparse"])
def test_evaluations_score_the_trained_policy_densely_and_the_policy_that_generates(bough, mode):
    """eval/* and eval_sparse/* are the numbers of `bough eval` with the same step's checkpoint. In fp64, so
    that a merged adapter changes no sampled token by rounding."""
    (bough.cwd / "reward.py").write_text(REWARD)
    settings = {**SPARSE, **EVALUATED, "sparse_training.mode": mode, "actor.optimizer.lr": 0.02}
    policy = [*POLICY]
    if mode == "exact_top_k":
        policy.append("rollout.sparse.summary=exact")
    if mode == "distill":
        settings |= DISTILL | EVALUATED
    if mode == "sparse_to_sparse":
        settings["rollout.sparse.replay"] = True
    config = write_experiment(bough, **settings, total_train_steps=3, seed=1, dtype="fp64")
    said = bough("train", config, *policy, ok=True, env=ENVIRONMENT).stderr
    run = bough.cwd / "runs/tiny/trial0"
    records = [record for record in read_metrics(run) if "eval/avg_at_k" in record]
    assert [record["step"] for record in records] == [0, 3]
    assert "accuracy with sparse attention" in said
    step = run / "checkpoints/step_3"
    generates = step / "model"
    if mode == "distill":
        bough("merge", step / "model", step / "sparse_adapter", "both", ok=True)
        generates = "both"
    for record, dense, sparse in ((records[0], "base", "base"), (records[1], step / "model", generates)):
        assert_evaluated(record, "eval", evaluate_alone(bough, dense))
        assert_evaluated(record, "eval_sparse", evaluate_alone(bough, sparse, *policy))
        assert record["eval/reward_mean"] != record["eval_sparse/reward_mean"]
    if mode == "distill":  # phi alone makes a difference, too
        assert evaluate_alone(bough, "both")["reward_mean"] != records[1]["eval/reward_mean"]


def test_evaluating_the_sparse_policy_leaves_training_unchanged_and_may_be_switched_off(bough):
    """An asynchronous run evaluates with requests in flight."""
    (bough.cwd / "reward.py").write_text(REWARD)
    settings = {**DISTILL, **EVALUATED, "evaluator.freq_steps": 1, "lora.rank": 4}
    config = write_experiment(bough, **settings, total_train_steps=3)
    never = [f"evaluator.{key}=false" for key in ("at_start", "at_end")] + ["evaluator.freq_steps=0"]
    runs = {"both": [], "dense": ["evaluator.sparse=false"], "neither": never}
    runs["async"] = ["rollout.max_head_offpolicyness=1"]
    for name, options in runs.items():
        bough("train", config, *options, f"trial_name={name}", ok=True, env=ENVIRONMENT)
    records = {name: comparable_metrics(bough.cwd / "runs/tiny" / name) for name in runs}
    assert all("eval_sparse/avg_at_k" in record for record in records["both"])
    assert not any("eval_sparse/avg_at_k" in record for record in records["dense"])
    assert all("eval/avg_at_k" in record for record in records["dense"])
    assert "eval_sparse/avg_at_k" in records["async"][-1]

    def of_training(name):
        kept = [record for record in records[name] if record["step"] > 0]
        return [{key: x for key, x in record.items() if not key.startswith("eval")} for record in kept]

    assert of_training("both") == of_training("dense") == of_training("neither")


def test_distillation_beside_a_trained_adapter(bough):
    """With lora the trained policy is an adapter, above which the sparse policy's adapter acts. A run that is
    resumed, and an asynchronous run."""
    config = write_experiment(bough, **DISTILL, **{"lora.rank": 4, "actor.optimizer.lr": 0.02})
    runs = bough.cwd / "runs/tiny"
    bough("train", config, "total_train_steps=4", "trial_name=whole", ok=True, env=ENVIRONMENT)
    bough("train", config, "total_train_steps=2", "trial_name=parts", ok=True, env=ENVIRONMENT)
    bough("train", config, "total_train_steps=4", "trial_name=parts", ok=True, env=ENVIRONMENT)
    whole, parts = final_state(runs / "whole"), final_state(runs / "parts")
    for name in ("adapter/adapter_model.safetensors", "sparse_adapter/adapter_model.safetensors"):
        assert whole[name] == parts[name], name
    step = runs / "whole/checkpoints/step_4"
    assert not (step / "model").exists()
    bough("merge", "base", step / "adapter", "dense", ok=True)
    bough("merge", "dense", step / "sparse_adapter", "both", ok=True)
    eta = ("rollout.max_head_offpolicyness=1", "trial_name=async", "total_train_steps=3")
    bough("train", config, *eta, ok=True, env=ENVIRONMENT)
    assert len(read_metrics(runs / "async")) == 3


def test_samples_are_chosen_by_acceptance(bough):
    config = write_experiment(bough, **SPARSE, total_train_steps=2)
    chosen = {"actor.keep_samples": 2, "actor.keep_samples_by": "acceptance", "gconfig.top_logprobs": 20}
    words = [f"{key}={value}" for key, value in chosen.items()]
    bough("train", config, *words, "gconfig.n_samples=4", "trial_name=chosen", ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/chosen"
    for record in read_metrics(run):
        assert record["oversampling/acceptance_4"] >= record["oversampling/acceptance_3"]
        assert record["oversampling/acceptance_3"] >= record["oversampling/acceptance_2"] > 0
        assert record["oversampling/acceptance_4"] > record["oversampling/acceptance_2"]
        assert record["sparse/acceptance"] == pytest.approx(record["oversampling/acceptance_4"], abs=2e-3)
        assert abs(record["sparse/overlap"] - record["sparse/acceptance"]) < 0.1
        assert record["time/recompute"] > 0 and record["time/update"] > 0
    refused = bough("train", config, *words, "sparse_training.mode=sparse_to_sparse", "trial_name=no")
    assert refused.returncode == 2 and "keep_samples_by" in refused.stderr


def test_a_draft_policy_generates_and_both_policies_are_trained(bough):
    config = write_experiment(bough, **DRAFT, total_train_steps=4, **{"actor.keep_samples": 3})
    init_draft(bough)
    bough("train", config, ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    records = read_metrics(run)
    assert len(records) == 4
    for record in records:
        assert record["mismatch/logprob_abs_diff"] > 1e-3  # another model generated the samples
        assert 0 < record["sparse/overlap_p5"] <= record["sparse/overlap"] < 1
        assert record["sparse/lr"] == record["optim/lr"] and record["sparse/grad_norm"] > 0
        assert record["oversampling/reward_4"] >= record["oversampling/reward_3"]
        assert "rollout/active_pages" not in record
    # The two policies are separate models, and each can be evaluated.
    step = run / "checkpoints/step_4"
    sizes = [(step / model / "model.safetensors").stat().st_size for model in ("model", "weak/model")]
    assert sizes[0] > 2 * sizes[1]
    bough("eval", "--model", step / "weak/model", "--data", "valid.jsonl", "--max-new-tokens", 4, ok=True)
    # A draft policy may use sparse attention too.
    sparse = ["rollout.sparse.budget=16x4", "rollout.sparse.dense_layers=0", "gconfig.max_new_tokens=100"]
    bough("train", config, *sparse, "trial_name=sparse", "total_train_steps=1", ok=True, env=ENVIRONMENT)
    assert read_metrics(bough.cwd / "runs/tiny/sparse")[0]["rollout/active_pages"] < 1


def test_unsupported_draft_policies_are_refused(bough):
    config = write_experiment(bough, **DRAFT)
    init_draft(bough)
    cases = [
        (["sparse_training.draft_path="], "draft_path"),
        (["sparse_training.mode=distill", "rollout.sparse.budget=16x4"], "draft_path"),
        (["lora.rank=4"], "no lora"),
        (["rollout.quantization=int8"], "no quantized copy"),
        (
            ["rollout.backend=vllm", "rollout.servers.addresses=[http://127.0.0.1:1]"],
            "generates with its own policy",
        ),
    ]
    for settings, words in cases:
        result = bough("train", config, *settings)
        assert result.returncode == 2 and words in result.stderr, (settings, result.stderr)
    tokenizer = bough.cwd / "weak/tokenizer.json"
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer.write_text(json.dumps(content))
    result = bough("train", config)
    assert result.returncode == 2 and "another vocabulary" in result.stderr


@pytest.mark.parametrize("mode", ["distill", "draft"])
def test_a_killed_run_of_two_policies_ends_as_one_that_was_not(bough, mode):
    settings = DISTILL if mode == "distill" else DRAFT
    init_draft(bough)
    config = write_experiment(bough, **settings, **{"saver.freq_steps": 2}, total_train_steps=7)
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    whole, killed = bough.cwd / "runs/tiny/whole", bough.cwd / "runs/tiny/killed"
    process = subprocess.Popen(
        [str(bough.program), "train", str(config), "trial_name=killed"],
        cwd=bough.cwd,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_steps(killed, 3, process, seconds=120)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    bough("train", config, "trial_name=killed", ok=True, env=ENVIRONMENT)
    assert final_state(killed).keys() == final_state(whole).keys()
    folder = {"distill": "sparse_adapter", "draft": "weak"}[mode]
    assert f"{folder}/optimizer.safetensors" in final_state(whole)
    for name, content in final_state(whole).items():
        if name != "state.json":
            assert final_state(killed)[name] == content, name
    assert comparable_metrics(killed) == comparable_metrics(whole)


@pytest.mark.parametrize("mode", ["distill", "draft"])
def test_an_asynchronous_run_publishes_both_policies(bough, mode):
    settings = DISTILL if mode == "distill" else DRAFT
    asynchronous = {"rollout.max_head_offpolicyness": 2, "saver.freq_steps": 2}
    init_draft(bough)
    config = write_experiment(bough, **settings, **asynchronous, total_train_steps=6)
    bough("train", config, ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    records = read_metrics(run)
    assert len(records) == 6
    assert all(0 < record["sparse/acceptance"] <= 1 for record in records)
    # A publication's checksum covers weights and adapters. The engine accepts a publication at every step.
    assert 1 <= max(record["staleness/max"] for record in records) <= 2
    # The generating policy's own step corrects for the age of its samples.
    assert all(0.5 < record["sparse/factor_mean"] < 2 for record in records)
    assert len({record["sparse/factor_mean"] for record in records}) > 1
    folder = {"distill": "sparse_adapter", "draft": "weak"}[mode]
    assert f"{folder}/optimizer.safetensors" in final_state(run)


@pytest.mark.parametrize(
    "setting, words",
    [
        ("rollout.sparse.budget=none", "expected a budget"),
        ("rollout.quantization=int8", "below its adapters"),
        ("sparse_training.mode=exact_top_k", "expected exact"),
        ("rollout.sparse.budget=[16x4, 100:16x4]", "larger budgets with growing context lengths"),
    ],
)
def test_incompatible_settings_are_refused(bough, setting, words):
    config = write_experiment(bough, **DISTILL)
    result = bough("train", config, setting)
    assert result.returncode == 2
    assert words in result.stderr
