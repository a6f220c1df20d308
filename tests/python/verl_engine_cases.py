"""The tests of bough.verl. test_verl.py runs them in verl's environment, with the plug-in's entry point.

The reference is verl's own FSDP engine, which runs on the CPU with the plug-in's platform.
"""

import sys
from copy import deepcopy
from dataclasses import fields
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import verl  # loads the plug-in
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.models.transformers import monkey_patch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.model import compute_position_id_with_mask
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_models import make_tiny_model, write_tiny_model

PLUGIN = sys.modules.get("bough.verl")  # not imported here: the entry point does it
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
LENGTHS = [(7, 5), (7, 9), (7, 9), (4, 6), (4, 3), (4, 8)]  # prompt, response; two groups
TEMPERATURE = 0.7


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    monkey_patch.is_trl_available = lambda: False  # this environment's TRL is newer than verl's
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def critic_folder(tmp_path_factory):
    """The tiny model with a head of one label."""
    from transformers import AutoModelForTokenClassification

    folder = tmp_path_factory.mktemp("critic")
    policy = make_tiny_model("qwen3")
    config = deepcopy(policy.config)
    config.num_labels = 1
    critic = AutoModelForTokenClassification.from_config(config)
    critic.model.load_state_dict(policy.model.state_dict())
    torch.manual_seed(3)
    torch.nn.init.normal_(critic.score.weight, std=0.1)
    torch.nn.init.normal_(critic.score.bias)
    critic.save_pretrained(folder)
    return folder


def model_config(folder, **settings):
    settings = {"load_tokenizer": False, "use_remove_padding": False, **settings}
    return HFModelConfig(path=str(folder), override_config={"attn_implementation": "eager"}, **settings)


def make_engine(folder, kind="language_model", reference=False, optimizer=None, checkpoint=None, **settings):
    settings = {"mixed_precision": FP32, "use_torch_compile": False, **settings}
    configs = {
        "model_config": model_config(folder),
        "optimizer_config": FSDPOptimizerConfig(**{"lr": 1e-3, "clip_grad": 0.5, **(optimizer or {})}),
        "checkpoint_config": checkpoint or CheckpointConfig(),
    }
    configs["model_config"].model_type = kind
    if reference:
        engine_class = {"language_model": FSDPEngineWithLMHead, "value_model": FSDPEngineWithValueHead}[kind]
        engine = engine_class(engine_config=FSDPEngineConfig(strategy="fsdp2", **settings), **configs)
    else:
        config = PLUGIN.BoughEngineConfig(**settings)
        engine = EngineRegistry.new(kind, config.strategy, engine_config=config, **configs)
    engine.initialize()
    return engine


def padded(rows, length, left):
    out = torch.zeros(len(rows), length, dtype=rows[0].dtype)
    for row, values in zip(out, rows, strict=True):
        row[length - len(values) :] = values if left else 0
        if not left:
            row[: len(values)] = values
    return out


def ppo_batch(**settings):
    """A mini-batch as verl's trainer gives it to a worker. One response has tokens of a tool."""
    generator = torch.Generator().manual_seed(5)

    def ids(n):
        return torch.randint(3, 300, (n,), generator=generator)

    shared = {7: ids(7), 4: ids(4)}
    prompts, responses = [shared[p] for p, _ in LENGTHS], [ids(r) for _, r in LENGTHS]
    responses[2][:4] = responses[1][:4]  # shared beyond the prompt
    masks = [torch.ones(r, dtype=torch.long) for _, r in LENGTHS]
    length = max(r for _, r in LENGTHS)
    ones = [torch.ones_like(prompt) for prompt in prompts]
    attention = torch.cat([padded(ones, 7, left=True), padded(masks, length, left=False)], dim=1)
    masks[1] = masks[1].clone()
    masks[1][3:5] = 0
    shape = (len(LENGTHS), length)
    prompts, responses = padded(prompts, 7, left=True), padded(responses, length, left=False)
    data = TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": compute_position_id_with_mask(attention),
            "response_mask": padded(masks, length, left=False),
            "old_log_probs": -3 - 3 * torch.rand(shape, generator=generator),
            "ref_log_prob": -3 - 3 * torch.rand(shape, generator=generator),
            "advantages": torch.randn(shape, generator=generator),
            "values": torch.randn(shape, generator=generator),
            "returns": torch.randn(shape, generator=generator),
        },
        batch_size=len(LENGTHS),
    )
    data = left_right_2_no_padding(data)
    fields = {
        "temperature": TEMPERATURE,
        "calculate_entropy": True,
        "global_batch_size": len(LENGTHS),
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "use_remove_padding": False,
    }
    tu.assign_non_tensor(data, **{**fields, **settings})
    return data


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def nested_batch():
    """The same mini-batch without padding, as verl's transfer queue gives it."""
    data = ppo_batch()
    data["prompts"] = nested([row[-p:] for row, (p, _) in zip(data["prompts"], LENGTHS, strict=True)])
    names = ("responses", "response_mask", "loss_mask", "old_log_probs", "ref_log_prob", "advantages")
    for name in names:
        data[name] = nested([row[:r] for row, (_, r) in zip(data[name], LENGTHS, strict=True)])
    return data.exclude("attention_mask", "max_response_len", "values", "returns")


def sft_batch():
    sequences = [torch.arange(3, 12), torch.tensor([3, 4, 5, 9, 9])]
    masks = [torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1])]
    positions = [torch.arange(len(s)) for s in sequences]
    data = {"input_ids": nested(sequences), "loss_mask": nested(masks), "position_ids": nested(positions)}
    data = TensorDict(data, batch_size=2)
    fields = {"temperature": 1.0, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    return tu.assign_non_tensor(data, use_remove_padding=False, **fields)


def actor_config(**settings):
    settings = {"rollout_n": 3, "ppo_micro_batch_size_per_gpu": 2, "use_kl_loss": True, **settings}
    return FSDPActorConfig(strategy="fsdp", entropy_coeff=0.01, **settings)


LOSSES = {
    "ppo": (ppo_batch, partial(ppo_loss, config=actor_config())),
    "sequence": (ppo_batch, partial(ppo_loss, config=actor_config(loss_agg_mode="seq-mean-token-mean"))),
    "nested": (nested_batch, partial(ppo_loss, config=actor_config())),
    "sft": (sft_batch, partial(sft_loss, config=None)),
}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(engine):
    return {name: full(p.grad).clone() for name, p in engine.module.named_parameters()}


def assert_same_gradients(engine, reference, tolerance=1e-5):
    got, expected = gradients(engine), gradients(reference)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max()
        assert scale > 0, name
        torch.testing.assert_close(got[name] / scale, value / scale, rtol=0, atol=tolerance, msg=name)


def test_verl_loads_the_plugin_by_its_entry_point():
    assert PLUGIN is not None
    [point] = [p for p in entry_points(group="verl.plugins") if p.name == "bough"]
    assert point.load() is PLUGIN
    assert EngineRegistry.get_engine_cls("language_model", "bough") is PLUGIN.BoughEngineWithLMHead
    assert EngineRegistry.get_engine_cls("value_model", "bough") is PLUGIN.BoughEngineWithValueHead
    assert verl.utils.device.get_device_name() == "cpu"


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
    assert_same_gradients(*engines)
    assert engines[0]._tree.last_plan["tree_tokens"] < engines[0]._tree.last_plan["tokens"]


def test_a_critic_equals_fsdp(critic_folder, monkeypatch):
    """Values and gradients. verl loads critics with flash attention, which the CPU lacks."""
    from transformers import AutoModelForTokenClassification

    def load(local_path, torch_dtype, model_config, trust_remote_code):
        return AutoModelForTokenClassification.from_pretrained(
            local_path, config=model_config, dtype=torch_dtype, attn_implementation="eager"
        )

    monkeypatch.setattr("verl.utils.model.load_valuehead_model", load)
    config = FSDPCriticConfig(ppo_micro_batch_size_per_gpu=2, rollout_n=3)
    loss_fn = partial(value_loss, config=config)
    engines = [make_engine(critic_folder, "value_model"), make_engine(critic_folder, "value_model", True)]
    values = []
    for engine in engines:
        data = ppo_batch()
        values.append(no_padding_2_padding(engine.infer_batch(data)["model_output"]["values"], data))
        engine.forward_backward_batch(ppo_batch(), loss_fn)
    torch.testing.assert_close(*values, rtol=0, atol=1e-5)
    assert_same_gradients(*engines)


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
    PLUGIN._refuse("engine_config", actor.engine, PLUGIN._ENGINE_VALUES)  # verl's defaults are accepted


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
    refused = {name.split(".")[0] for name in PLUGIN._ENGINE_VALUES}
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


def test_other_models_processes_and_batches_are_refused(model_folder, monkeypatch):
    configs = (PLUGIN.BoughEngineConfig(), FSDPOptimizerConfig(), CheckpointConfig())
    with pytest.raises(ValueError, match="model_config.lora_rank: got 8"):
        PLUGIN.BoughEngineWithLMHead(model_config(model_folder, lora_rank=8), *configs)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="in one process, got 2"):
        patch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
        PLUGIN.BoughEngineWithLMHead(model_config(model_folder), *configs)
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
