"""`bough train` with adapters: a resumed run equals an uninterrupted one, engine and trainer agree, and the
base model does not change."""

import json

import pytest
import torch
from run_util import (
    ENVIRONMENT,
    comparable_metrics,
    final_state,
    last_checkpoint,
    read_metrics,
    write_experiment,
)
from safetensors.torch import load_file, save_file

LORA = {"lora.rank": 4, "lora.alpha": 8, "actor.optimizer.lr": 0.02, "evaluator.freq_steps": 0}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_is_the_same_bit_for_bit(bough, dtype):
    config = write_experiment(bough, **LORA, dtype=dtype, **{"actor.kl_loss_coef": 0.1})
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    bough("train", config, "trial_name=parts", "total_train_steps=4", ok=True, env=ENVIRONMENT)
    bough("train", config, "trial_name=parts", ok=True, env=ENVIRONMENT)
    whole, parts = (bough.cwd / "runs" / "tiny" / name for name in ("whole", "parts"))
    of_whole, of_parts = final_state(whole), final_state(parts)
    for name in ("adapter/adapter_model.safetensors", "optimizer.safetensors"):
        assert of_whole[name] == of_parts[name], name
    assert not (last_checkpoint(whole) / "model").exists()
    steps = {r["step"]: r for r in comparable_metrics(parts)}
    for record in comparable_metrics(whole):
        if "optim/grad_norm" in record:
            assert record["optim/grad_norm"] == steps[record["step"]]["optim/grad_norm"], record["step"]
    # The reference is the model without its adapter, which is the policy of the first step.
    kl = [record["loss/kl"] for record in read_metrics(whole) if "loss/kl" in record]
    assert kl[0] == 0 and kl[-1] > 0, kl
    config_file = json.loads((last_checkpoint(whole) / "adapter" / "adapter_config.json").read_text())
    assert (config_file["r"], config_file["lora_alpha"]) == (4, 8)


def test_an_asynchronous_run(bough):
    config = write_experiment(bough, **LORA, **{"rollout.max_head_offpolicyness": 2})
    bough("train", config, ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs" / "tiny" / "trial0"
    # Engine and trainer agree on tokens of the trainer's version. Older tokens differ by a few updates.
    records = [r for r in read_metrics(run) if "mismatch/logprob_abs_diff" in r]
    assert records and records[0]["mismatch/logprob_abs_diff"] < 1e-4
    assert all(r["mismatch/logprob_abs_diff"] < 0.5 for r in records)


def write_tied_base(bough):
    """Replaces the base by one with tied embeddings. Returns a folder with a random adapter, also of lm_head,
    whose policy is far from the base's."""
    sizes = ("--hidden-size", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1)
    bough("init", "base", *sizes, "--tie", "--force", ok=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for module, rows in (("model.layers.1.self_attn.q_proj", 32), ("lm_head", 272)):
        for which, shape in (("A", (4, 32)), ("B", (rows, 4))):
            name = f"base_model.model.{module}.lora_{which}.weight"
            tensors[name] = 0.3 * torch.randn(shape, generator=generator)
    folder = bough.cwd / "start"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


HEAD = "base_model.model.lm_head.lora_B.weight"


@pytest.mark.parametrize(
    "settings", [{}, {"rollout.max_head_offpolicyness": 1}, {"rollout.quantization": "int8"}]
)
def test_an_adapter_of_a_tied_head(bough, settings):
    """Generation, training, publication, resuming and merging. The KL term gives every step a gradient."""
    optimizer = {"actor.optimizer.lr": 0.02, "actor.kl_loss_coef": 0.1, "evaluator.freq_steps": 0}
    config = write_experiment(bough, **optimizer, **settings)
    start = write_tied_base(bough)
    runs = bough.cwd / "runs" / "tiny"
    bough("train", config, f"lora.path={start}", "trial_name=whole", ok=True, env=ENVIRONMENT)
    records = [r for r in read_metrics(runs / "whole") if "mismatch/logprob_abs_diff" in r]
    differences = [r["mismatch/logprob_abs_diff"] for r in records]
    # An engine that runs in parallel, or in int8, differs from the trainer after a few updates.
    assert len(differences) == 7 and differences[0] < (1e-2 if settings else 1e-5), differences
    assert max(differences) < (0.5 if settings else 1e-5), differences
    # Both engines would have the same entropy without the adapter, which is near that of equal probabilities.
    assert records[0]["loss/entropy"] < 4, records[0]
    name = "adapter/adapter_model.safetensors"
    adapter = last_checkpoint(runs / "whole") / "adapter"
    trained = load_file(adapter / "adapter_model.safetensors")[HEAD]
    assert (trained - load_file(start / "adapter_model.safetensors")[HEAD]).abs().max() > 0.01
    if settings:
        return
    for steps in ("total_train_steps=4", "total_train_steps=7"):
        bough("train", config, f"lora.path={start}", "trial_name=parts", steps, ok=True, env=ENVIRONMENT)
    assert final_state(runs / "parts")[name] == final_state(runs / "whole")[name]
    bough("merge", "base", start, "merged", ok=True)
    bough("train", config, "model.path=merged", "trial_name=merged", ok=True, env=ENVIRONMENT)
    entropy = [r["loss/entropy"] for r in read_metrics(runs / "merged") if "loss/entropy" in r]
    assert entropy[0] == pytest.approx(records[0]["loss/entropy"], rel=1e-4)


def test_servers_get_no_adapter_of_a_tied_head(bough):
    settings = {"rollout.backend": "vllm", "rollout.servers.addresses": ["http://127.0.0.1:9"]}
    config = write_experiment(bough, **settings)
    result = bough("train", config, f"lora.path={write_tied_base(bough)}", env=ENVIRONMENT)
    assert result.returncode == 2 and "lora.targets" in result.stderr and "tied" in result.stderr, result


def test_a_synchronous_engine_has_the_trainers_log_probabilities(bough):
    config = write_experiment(bough, **LORA)
    bough("train", config, ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs" / "tiny" / "trial0"
    records = [r for r in read_metrics(run) if "mismatch/logprob_abs_diff" in r]
    assert len(records) == 7
    assert all(r["mismatch/logprob_abs_diff"] < 1e-5 for r in records), records
    bough("merge", "base", last_checkpoint(run) / "adapter", "merged", ok=True)
    bough(
        "train",
        config,
        "model.path=merged",
        "trial_name=again",
        "total_train_steps=1",
        ok=True,
        env=ENVIRONMENT,
    )
