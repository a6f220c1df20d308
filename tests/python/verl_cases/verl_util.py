"""Engines of bough.verl and of verl, and batches as verl's trainer makes them."""

import sys
from functools import partial

import torch
import verl  # noqa: F401  # loads the plug-in
from tensordict import TensorDict
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.model import compute_position_id_with_mask
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

PLUGIN = sys.modules.get("bough.verl")  # not imported here: the entry point does it
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
LENGTHS = [(7, 5), (7, 9), (7, 9), (4, 6), (4, 3), (4, 8)]  # prompt, response; two groups
TEMPERATURE = 0.7


def model_config(folder, **settings):
    settings = {"load_tokenizer": False, "use_remove_padding": False, **settings}
    return HFModelConfig(path=str(folder), override_config={"attn_implementation": "eager"}, **settings)


def make_engine(
    folder, kind="language_model", reference=False, optimizer=None, checkpoint=None, model=None, **settings
):
    settings = {"mixed_precision": FP32, "use_torch_compile": False, **settings}
    configs = {
        "model_config": model_config(folder, **(model or {})),
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


def value_loss_fn():
    return partial(value_loss, config=FSDPCriticConfig(ppo_micro_batch_size_per_gpu=2, rollout_n=3))


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(engine):
    return {name: full(p.grad).clone() for name, p in engine.module.named_parameters() if p.requires_grad}


def assert_same_gradients(got, expected, tolerance=1e-5):
    """A difference counts in relation to the parameter's largest gradient, or to 10% of the model's largest:
    a much smaller gradient is a sum of terms that cancel, and has their rounding errors."""
    assert got.keys() == expected.keys()
    floor = max(value.abs().max() for value in expected.values()) / 10
    for name, value in expected.items():
        scale = value.abs().max()
        assert scale > 0, name
        error = ((got[name] - value).abs().max() / max(scale, floor)).item()
        assert error <= tolerance, (name, error)


LORA = {"lora_rank": 4, "lora_alpha": 8}


def with_random_adapters(*engines):
    """The same values in all engines. lora_B is 0 at first, so lora_A would have no gradient."""
    with torch.no_grad():
        for engine in engines:
            generator = torch.Generator().manual_seed(9)
            for name, p in engine.module.named_parameters():
                if ".lora_" in name:
                    value = 0.05 * torch.randn(p.shape, generator=generator)
                    if isinstance(p, DTensor):
                        value = distribute_tensor(value, p.device_mesh, p.placements)
                    p.copy_(value)
            if hasattr(engine, "refresh"):
                engine.refresh()
    return engines


def log_probs(engine):
    data = ppo_batch()
    with engine.eval_mode():
        return no_padding_2_padding(engine.infer_batch(data)["model_output"]["log_probs"], data)
