"""The tests of bough.verl. test_verl.py runs them in verl's environment, with the plug-in's entry point.

The reference is verl's own FSDP engine, which runs on the CPU with the plug-in's platform.
"""

from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import verl
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.utils.padding import no_padding_2_padding
from verl_util import (
    FP32,
    LOSSES,
    PLUGIN,
    assert_same_gradients,
    gradients,
    make_engine,
    model_config,
    ppo_batch,
    value_loss_fn,
)


def test_verl_loads_the_plugin_by_its_entry_point():
    assert PLUGIN is not None
    [point] = [p for p in entry_points(group="verl.plugins") if p.name == "bough"]
    assert point.load() is PLUGIN
    assert EngineRegistry.get_engine_cls("language_model", "bough") is PLUGIN.BoughEngineWithLMHead
    assert EngineRegistry.get_engine_cls("value_model", "bough") is PLUGIN.BoughEngineWithValueHead
    assert verl.utils.device.get_device_name() == "cpu"
    for kind in ("language_model", "value_model"):
        engines = EngineRegistry._engines[kind]["bough"]
        assert engines["cuda"] is engines["cpu"]


@pytest.mark.parametrize("forward_only", [False, True])
def test_log_probs_and_entropies_equal_fsdp(model_folder, forward_only):
    """The engine of a reference policy has no optimizer."""
    engines = [
        make_engine(model_folder, forward_only=forward_only),
        make_engine(model_folder, reference=True),
    ]
    assert (engines[0].optimizer is None) == forward_only
    found = []
    for engine in engines:
        data = ppo_batch()
        with engine.eval_mode():
            output = engine.infer_batch(data)["model_output"]
        found.append([no_padding_2_padding(output[name], data) for name in ("log_probs", "entropy")])
    for got, expected in zip(*found, strict=True):
        assert got.abs().max() > 1
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_equal_fsdp(model_folder, loss):
    """verl splits the mini-batch into micro-batches. The plug-in computes it at once."""
    make_batch, loss_fn = LOSSES[loss]
    engines = [make_engine(model_folder), make_engine(model_folder, reference=True)]
    losses = [
        sum(engine.forward_backward_batch(make_batch(), loss_fn, forward_only=False)["loss"])
        for engine in engines
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert_same_gradients(*map(gradients, engines))
    assert engines[0]._tree.last_plan["tree_tokens"] < engines[0]._tree.last_plan["tokens"]


def test_a_critic_equals_fsdp(critic_folder, monkeypatch):
    """Values and gradients. verl loads critics with flash attention, which the CPU lacks."""
    from transformers import AutoModelForTokenClassification

    def load(local_path, torch_dtype, model_config, trust_remote_code):
        return AutoModelForTokenClassification.from_pretrained(
            local_path, config=model_config, dtype=torch_dtype, attn_implementation="eager"
        )

    monkeypatch.setattr("verl.utils.model.load_valuehead_model", load)
    loss_fn = value_loss_fn()
    engines = [make_engine(critic_folder, "value_model"), make_engine(critic_folder, "value_model", True)]
    values = []
    for engine in engines:
        data = ppo_batch()
        values.append(no_padding_2_padding(engine.infer_batch(data)["model_output"]["values"], data))
        engine.forward_backward_batch(ppo_batch(), loss_fn)
    torch.testing.assert_close(*values, rtol=0, atol=1e-5)
    assert_same_gradients(*map(gradients, engines))


def test_a_step_is_that_of_adamw(model_folder):
    """Gradients are clipped, torch.optim.AdamW changes the weights with the schedule's learning rate."""
    settings = {"lr_warmup_steps": 2, "total_training_steps": 10, "betas": (0.8, 0.95), "weight_decay": 0.1}
    engine = make_engine(model_folder, optimizer=settings)
    assert engine.lr_scheduler_step() == pytest.approx(5e-4)
    weights = {name: p.detach().clone().requires_grad_() for name, p in engine.module.named_parameters()}
    optimizer = torch.optim.AdamW(weights.values(), lr=5e-4, betas=(0.8, 0.95), weight_decay=0.1)
    for _ in range(2):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(ppo_batch(), LOSSES["ppo"][1])
        for name, p in engine.module.named_parameters():
            weights[name].grad = p.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        assert norm > 0.5
        optimizer.step()
        assert engine.optimizer_step() == pytest.approx(norm.item())
    for name, p in engine.module.named_parameters():
        torch.testing.assert_close(p, weights[name], rtol=0, atol=0)


def test_a_step_in_bf16_changes_fp32_weights(model_folder):
    """verl's default: the model computes in bf16, the optimizer's weights are fp32 and keep small changes."""
    engine = make_engine(model_folder, mixed_precision=None, optimizer={"lr": 1e-6, "weight_decay": 0.0})
    exact = make_engine(model_folder)
    for each in (engine, exact):
        each.forward_backward_batch(ppo_batch(), LOSSES["ppo"][1])
    got, expected = (torch.cat([g.flatten() for g in gradients(e).values()]) for e in (engine, exact))
    assert got.dtype == torch.float32
    error = (got - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.1
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.optimizer_step()
    modules = (engine.module, engine._compute)
    for old, new, computed in zip(before, *(module.parameters() for module in modules), strict=True):
        assert computed.dtype == torch.bfloat16 and new.dtype == torch.float32
        assert torch.equal(computed, new.bfloat16())
        assert 0 < (new - old).abs().max() < 2e-6


def test_a_checkpoint_continues_the_run(model_folder, tmp_path):
    def step(engine):
        with engine.train_mode():
            metrics = engine.train_batch(ppo_batch(), LOSSES["ppo"][1])["metrics"]
        return metrics["grad_norm"], engine.lr_scheduler_step()

    schedule = {"lr_warmup_steps": 5, "total_training_steps": 10}
    contents = ["model", "optimizer", "extra"]
    checkpoint = CheckpointConfig(save_contents=contents, load_contents=contents)
    first = make_engine(model_folder, optimizer=schedule, checkpoint=checkpoint)
    step(first), step(first)
    first.save_checkpoint(str(tmp_path / "step_2"), max_ckpt_to_keep=1)
    random = torch.rand(3)
    second = make_engine(model_folder, optimizer=schedule, checkpoint=checkpoint)
    second.load_checkpoint(str(tmp_path / "step_2"))
    assert torch.equal(torch.rand(3), random)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "step_2" / "huggingface").state_dict()
    for name, value in second.get_per_tensor_param()[0]:
        assert torch.equal(value, saved[name])
    assert step(first) == step(second)
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)
    first.save_checkpoint(str(tmp_path / "step_3"), max_ckpt_to_keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_verls_worker_trains(model_folder, monkeypatch):
    """TrainingWorker, which verl's trainers start by ray, in this process: log-probabilities and an epoch of
    mini-batches."""
    from verl.workers.engine_workers import TrainingWorker

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=model_config(model_folder),
        engine_config=PLUGIN.BoughEngineConfig(mixed_precision=FP32),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2),
        checkpoint_config=CheckpointConfig(),
    )
    worker = TrainingWorker(config)
    worker.reset()
    worker.set_loss_fn(LOSSES["ppo"][1])
    output = worker.infer_batch(ppo_batch(compute_loss=False))
    assert output["log_probs"].is_nested
    batch = ppo_batch(mini_batch_size=3, epochs=4, seed=1, dataloader_kwargs={"shuffle": False})
    metrics = tu.get(worker.train_mini_batch(batch), "metrics")
    assert len(metrics["loss"]) == 8
    assert metrics["loss"][-2:] < metrics["loss"][:2]


def test_the_config_keys_choose_the_engine():
    """The keys of docs/python.md, in verl's own configuration."""
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    keys = ["actor_rollout_ref.actor.strategy=bough", "critic.strategy=bough"]
    options = ["_target_=bough.verl.BoughEngineConfig", "+memory=8e9"]
    key = "actor_rollout_ref.actor.fsdp_config."
    keys += [word.replace("+", "+" + key) if "+" in word else key + word for word in options]
    keys += ["actor_rollout_ref.actor.use_dynamic_bsz=True"]
    with initialize_config_dir(folder, version_base=None):
        config = compose("ppo_trainer", overrides=keys)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.engine.strategy == "bough" and actor.engine.memory == 8e9
    assert config.actor_rollout_ref.ref.strategy == config.critic.strategy == "bough"
    PLUGIN.refuse("engine_config", actor.engine, PLUGIN.ENGINE_VALUES)  # verl's defaults are accepted


def test_every_setting_of_verls_engine_is_honoured_or_refused_or_changes_no_result():
    honoured = {"strategy", "forward_only", "model_dtype", "mixed_precision"}
    batches = {"use_dynamic_bsz", "use_no_sync_for_gradient_accumulation", "pad_to_length_bucket"}
    batches |= {
        f"{p}{n}" for p in ("", "infer_") for n in ("max_token_len_per_gpu", "micro_batch_size_per_gpu")
    }
    sharding = {"wrap_policy", "reshard_after_forward", "forward_prefetch", "use_orig_params"}
    kernels = {"use_fused_kernels", "use_remove_padding", "use_torch_compile", "entropy_checkpointing"}
    kernels |= {"entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size"}
    # seed is full_determinism's, turbo_config the strategy fsdp_turbo's. FSDPEngine does not read dtype.
    unused = {"seed", "turbo_config", "dtype", "_target_"}
    refused = {name.split(".")[0] for name in PLUGIN.ENGINE_VALUES}
    known = honoured | batches | sharding | kernels | unused | refused
    assert {field.name for field in fields(FSDPEngineConfig)} == known


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ulysses_sequence_parallel_size", 2, "ulysses_sequence_parallel_size: got 2, expected 1"),
        ("param_offload", True, "param_offload: got True"),
        ("optimizer_offload", True, "optimizer_offload: got True"),
        ("fsdp_size", 2, "fsdp_size: got 2, expected -1 or 1"),
        ("full_determinism", True, "full_determinism: got True"),
        ("model_dtype", "fp16", "model_dtype: got 'fp16', expected 'fp32' or 'bf16'"),
        ("mixed_precision", {"param_dtype": "fp16"}, "param_dtype: got 'fp16'"),
        ("mixed_precision", {"reduce_dtype": "bf16"}, "reduce_dtype: got 'bf16'"),
        ("memory", -1.0, "memory: got -1.0"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(model_folder, name, value, message):
    with pytest.raises(ValueError, match=message):
        make_engine(model_folder, **{name: value})


def test_other_batches_and_devices_are_refused(model_folder):
    engine = make_engine(model_folder)
    loss_fn = LOSSES["ppo"][1]
    with pytest.raises(ValueError, match="data.calculate_sum_pi_squared: got True"):
        engine.infer_batch(ppo_batch(calculate_sum_pi_squared=True))
    batch = ppo_batch()
    batch["temperature"] = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="temperature: got several values"):
        engine.forward_backward_batch(batch, loss_fn)
    batch = ppo_batch()
    batch["position_ids"] = batch["position_ids"] + 1
    with pytest.raises(ValueError, match="position_ids"):
        engine.forward_backward_batch(batch, loss_fn)
    assert all(p.grad is None for p in engine.module.parameters())
    with pytest.raises(ValueError, match="to: got 'cuda'"):
        engine.to("cuda")
