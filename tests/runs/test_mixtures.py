"""Mixtures of experts in whole runs: bough init, sft, train, int8 weights, and what is refused."""

import json

import pytest
import torch
from host_env import is_batch_invariant
from run_util import ENVIRONMENT, final_state, last_checkpoint, read_metrics, write_experiment
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

SHAPE = ("--hidden-size", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1)
EXPERTS = ("--experts", 4, "--experts-per-token", 2)


def write_mixture_experiment(bough, **settings):
    """The experiment of run_util.py, with four experts of which a token uses two. The entropy term gives
    every step a gradient."""
    config = write_experiment(bough, **{"actor.entropy_coef": 0.1, "actor.optimizer.lr": 0.01, **settings})
    bough("init", "base", *SHAPE, *EXPERTS, "--force", ok=True)
    return config


def test_init_makes_mixtures(bough):
    assert (
        bough("init", "a", *SHAPE, *EXPERTS, "--expert-size", 24, "--json", ok=True).json["architecture"]
        == "qwen3_moe"
    )
    config = json.loads((bough.cwd / "a/config.json").read_text())
    assert config["num_local_experts"] == 4 and config["num_experts_per_tok"] == 2
    assert config["moe_intermediate_size"] == 24 and config["intermediate_size"] == 96
    bough("init", "b", *SHAPE, "--arch", "mixtral", "--experts-per-token", 3, ok=True)
    config = json.loads((bough.cwd / "b/config.json").read_text())
    # A token uses as many elements as a dense layer of 3 x 32 has.
    assert config["num_local_experts"] == 8 and config["intermediate_size"] == 32
    text = bough("init", "c", *SHAPE, "--arch", "olmoe", "--experts", 4, ok=True).stdout
    assert "olmoe" in text and "4 experts of 48, 2 a token" in text
    for arguments, words in (
        (["--arch", "llama", "--experts", 4], ["--experts", "llama", "no experts"]),
        (["--experts", 2, "--experts-per-token", 3], ["num_experts_per_tok", "3", "2"]),
        (["--experts", 0], ["--experts", "0"]),
        (
            ["--arch", "mixtral", "--expert-size", 8, "--intermediate-size", 9],
            ["--intermediate-size", "mixtral"],
        ),
    ):
        refused = bough("init", "no", *SHAPE, *arguments)
        assert refused.returncode == 2, arguments
        assert all(word in refused.stderr for word in words), refused.stderr


def test_a_mixture_is_trained_by_grpo(bough):
    config = write_mixture_experiment(bough)
    runs = bough.cwd / "runs/tiny"
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    records = read_metrics(runs / "whole")
    limit = 0 if is_batch_invariant() else 1e-4
    assert all(record["mismatch/logprob_abs_diff"] <= limit for record in records[1:])
    trained = last_checkpoint(runs / "whole") / "model"
    weights, initial = (load_file(path / "model.safetensors") for path in (trained, bough.cwd / "base"))
    assert weights.keys() == initial.keys()
    for part in ("mlp.gate.weight", "mlp.experts.3.gate_proj.weight", "mlp.experts.0.down_proj.weight"):
        name = f"model.layers.1.{part}"
        assert (weights[name] - initial[name]).abs().max() > 1e-3, name
    loaded, info = AutoModelForCausalLM.from_pretrained(trained, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(
        loaded.state_dict()["model.layers.1.mlp.experts.down_proj"][3],
        weights["model.layers.1.mlp.experts.3.down_proj.weight"],
    )
    for steps in ("total_train_steps=4", "total_train_steps=7"):
        bough("train", config, "trial_name=parts", steps, ok=True, env=ENVIRONMENT)
    assert final_state(runs / "parts") == final_state(runs / "whole")


@pytest.mark.parametrize(
    "settings", [{"rollout.quantization": "int8"}, {"dtype": "bf16", "model.router_dtype": "model"}]
)
def test_engine_and_trainer_of_a_mixture_differ_by_rounding(bough, settings):
    config = write_mixture_experiment(bough, **settings)
    bough("train", config, ok=True, env=ENVIRONMENT)
    records = read_metrics(bough.cwd / "runs/tiny/trial0")[1:]
    assert len(records) == 7
    assert all(record["mismatch/logprob_abs_diff"] < 0.1 for record in records)


def test_a_mixture_is_trained_by_sft(bough):
    bough("init", "base", *SHAPE, *EXPERTS, ok=True)
    lines = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (bough.cwd / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--model", "base", "--data", "data.jsonl", "--lr", 0.01, "--json"]
    report = bough("sft", *arguments, "--out", "out", "--max-steps", 60, ok=True, env=ENVIRONMENT).json
    assert report["last_loss"] < 0.5 * report["first_loss"], report
    AutoModelForCausalLM.from_pretrained(bough.cwd / "out")


def aux_losses(run):
    return [record["experts/aux_loss"] for record in read_metrics(run)[1:]]


def test_the_load_balancing_loss_falls(bough):
    config = write_mixture_experiment(bough, **{"actor.router_z_loss_coef": 1e-3, "total_train_steps": 20})
    runs = bough.cwd / "runs/tiny"
    bough("train", config, "trial_name=with", "actor.router_aux_loss_coef=10", ok=True, env=ENVIRONMENT)
    bough("train", config, "trial_name=without", "actor.router_aux_loss_coef=1e-9", ok=True, env=ENVIRONMENT)
    balanced, free = aux_losses(runs / "with"), aux_losses(runs / "without")
    assert balanced[0] == free[0] > 2  # the number of experts a token is that of equal loads
    assert balanced[-1] < min(2.02, free[-1]), (balanced, free)
    records = read_metrics(runs / "with")[1:]
    assert all(record["experts/z_loss"] > 0 for record in records)
    bough("train", config, "trial_name=none", "actor.router_z_loss_coef=0", ok=True, env=ENVIRONMENT)
    assert not any("_loss" in name for name in read_metrics(runs / "none")[-1] if name.startswith("experts/"))


def test_losses_of_routers_of_two_ranks_are_those_of_one(bough):
    settings = {"actor.router_aux_loss_coef": 1, "actor.router_z_loss_coef": 0.1, "total_train_steps": 3}
    config = write_mixture_experiment(bough, **settings, **{"actor.routing_replay": "R3"})
    runs = bough.cwd / "runs/tiny"
    for index, extra in enumerate(("actor.loss=ppo", "actor.deterministic=true", "actor.loss=gspo")):
        one, two = f"one{index}", f"two{index}"
        bough("train", config, f"trial_name={one}", extra, ok=True, env=ENVIRONMENT)
        bough("train", config, f"trial_name={two}", "--ranks", 2, extra, ok=True, env=ENVIRONMENT)
        assert aux_losses(runs / two) == pytest.approx(aux_losses(runs / one), rel=1e-4), extra
        assert all("experts/routes_differ" in record for record in read_metrics(runs / one)[1:]), extra


def test_sft_reports_the_losses_of_routers(bough):
    bough("init", "base", *SHAPE, *EXPERTS, ok=True)
    lines = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (bough.cwd / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--model", "base", "--data", "data.jsonl", "--lr", 0.01, "--out", "out", "--max-steps", 20]
    losses = ["router_aux_loss_coef=10", "router_z_loss_coef=0.001"]
    report = bough("sft", *arguments, *losses, "--json", ok=True, env=ENVIRONMENT).json
    assert 1.98 < report["aux_loss"] < 2.02 and report["z_loss"] > 0, report
    assert "aux loss" in bough("sft", *arguments, *losses, ok=True, env=ENVIRONMENT).stdout
    refused = bough("sft", *arguments, "router_z_loss_coef=-1", env=ENVIRONMENT)
    assert refused.returncode == 2 and "router_z_loss_coef" in refused.stderr, refused.stderr
    bough("init", "dense", *SHAPE, ok=True)
    refused = bough("sft", "--model", "dense", *arguments[2:], *losses, env=ENVIRONMENT)
    assert refused.returncode == 2
    assert "router_aux_loss_coef: got 10, but the model has no experts" in refused.stderr, refused.stderr


def test_losses_of_routers_without_effect_are_refused(bough):
    config = write_mixture_experiment(bough)
    bough("init", "dense", *SHAPE, ok=True)
    bough("init", "all", *SHAPE, "--experts", 4, "--experts-per-token", 4, ok=True)
    for model, setting, words in (
        ("dense", "router_aux_loss_coef=0.1", "no experts; expected 0"),
        ("dense", "router_z_loss_coef=0.1", "no experts; expected 0"),
        ("all", "router_aux_loss_coef=0.1", "uses all experts"),
        ("base", "router_aux_loss_coef=-0.1", "at least 0"),
    ):
        refused = bough("train", config, f"model.path={model}", f"actor.{setting}", env=ENVIRONMENT)
        assert refused.returncode == 2, (model, setting)
        assert f"actor.{setting.split('=')[0]}" in refused.stderr and words in refused.stderr, refused.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lora.rank=2 lora.targets=[down_proj]", ["lora.targets", "down_proj", "experts have no adapters"]),
        ("model.router_dtype=model", ["router_dtype", "no effect", "bf16"]),
        ("model.router_dtype=half", ["model.router_dtype", "fp32", "model"]),
    ],
)
def test_settings_that_a_mixture_does_not_support_are_refused(bough, override, words):
    config = write_mixture_experiment(bough)
    refused = bough("train", config, *override.split(), env=ENVIRONMENT)
    assert refused.returncode == 2
    assert all(word in refused.stderr for word in words), refused.stderr


@pytest.mark.parametrize("backend", ["t2", "p2", "c2"])
def test_ranks_do_not_share_a_mixture(bough, backend):
    config = write_mixture_experiment(bough)
    words = ["--ranks", 3, f"actor.backend={backend}", "rollout.ranks=1"]
    refused = bough("train", config, *words, env=ENVIRONMENT)
    assert refused.returncode == 2
    assert "parallelism: got 2" in refused.stderr and "experts" in refused.stderr, refused.stderr
