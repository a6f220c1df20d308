"""The settings of verl's engine "bough": those of TreeEngine, and verl's that it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.workers.config import FSDPEngineConfig

from bough.native import UserError


@dataclass
class BoughEngineConfig(FSDPEngineConfig):
    """FSDPEngineConfig with the options of bough.TreeEngine. Without it, strategy=bough also takes a plain
    FSDPEngineConfig.

    Args:
        memory: the most bytes that a mini-batch may take beyond weights, gradients and optimizer.
        max_tokens_per_pass: the most tokens that go through the model at once.
        plan_strategy: how a mini-batch is planned: auto, blocks, packed, path or dense.
    """

    strategy: str = "bough"
    memory: float | None = None
    max_tokens_per_pass: int | None = None
    plan_strategy: str = "auto"

    def __post_init__(self) -> None: ...  # FSDPEngineConfig's refuses other strategies than FSDP's


# The values that the engine honours. Other fields divide weights, split or pad batches, or save memory: they
# do not change what is computed, and have no effect.
ENGINE_VALUES = {
    "param_offload": (False,),
    "optimizer_offload": (False,),
    "offload_policy": (False,),
    "fsdp_size": (-1, 1),
    "ulysses_sequence_parallel_size": (1,),
    "full_determinism": (False,),
    "router_replay.mode": ("disabled",),
    "qat.enable": (False,),
    "pad_to_length": (False,),
}
MODEL_VALUES = {
    "lora.rank": (0,),  # Megatron's
    "target_parameters": (None,),
    "use_liger": (False,),
    "enable_activation_offload": (False,),
    "mtp.enable": (False,),
    "tiled_mlp.enabled": (False,),
}
CHECKPOINT_VALUES = {"async_save": (False,)}
BATCH_VALUES = {
    "calculate_sum_pi_squared": (False,),
    "distillation_use_topk": (False,),
    "distillation_only": (False,),
    "enable_routing_replay": (False,),
    "pad_mode": ("no_padding",),
}


def refuse(where: str, config: Any, allowed: dict[str, tuple[Any, ...]]) -> None:
    for name, values in allowed.items():
        value = config
        for part in name.split("."):
            value = value.get(part, values[0]) if hasattr(value, "get") else values[0]
        value = getattr(value, "value", value)  # enums
        if value not in values:
            expected = " or ".join(map(repr, values))
            raise UserError(f"{where}.{name}: got {value!r}, expected {expected} with the strategy bough")
