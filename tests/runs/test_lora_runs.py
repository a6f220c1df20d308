"""`bough train` with adapters: a resumed run equals an uninterrupted one, engine and trainer agree, and the
base model does not change."""

import json

import pytest
from run_util import (
    ENVIRONMENT,
    comparable_metrics,
    final_state,
    last_checkpoint,
    read_metrics,
    write_experiment,
)

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
