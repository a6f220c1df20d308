"""TRL's trainers over prefix trees: TreeGRPOTrainer and TreeRLOOTrainer.

    from bough.trl import TreeGRPOTrainer
    trainer = TreeGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), train_dataset=...)

They compute what TRL's own trainers compute. Only the log-probabilities and entropies of policy, old policy
and reference come from a TreeEngine, so tokens that the samples of a prompt share are computed once.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from bough.native import UserError
from bough.sequences import sequences_from_padded
from bough.tree_engine import TreeEngine


class TreeTrainerMixin:
    """Put it before a trainer of TRL that has _get_per_token_logps_and_entropies.

    Args:
        keep_groups: TRL shuffles the samples of a generation batch before it splits them into steps. True: it
            shuffles whole groups, so that a step gets samples that share their prompt. False: as TRL does,
            for runs that must repeat TRL's with the same seed.
        engine_options: arguments of TreeEngine, such as {"memory": 8e9}.
        All others are TRL's.

    Gradient checkpointing of TRL has no effect: the engine keeps what fits into `memory`. Under autocast
    (bf16 of TRL's defaults) it computes in the dtype of the weights.
    """

    def __init__(
        self,
        *args: Any,
        keep_groups: bool = True,
        engine_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.keep_groups = keep_groups
        self._engine_options = engine_options or {}
        self._engines: dict[int, TreeEngine] = {}
        self._engine_of(self.model)  # refuses the model before the first step
        if getattr(self.args, "cast_lm_head_to_fp32", False):
            raise UserError(
                "cast_lm_head_to_fp32: got True, expected False: the engine computes in one dtype"
            )
        if getattr(self, "aux_loss_enabled", False):
            raise UserError(
                "the auxiliary loss of a mixture of experts is on; the engine computes no such models"
            )

    def _engine_of(self, model: torch.nn.Module) -> TreeEngine:
        module = self.accelerator.unwrap_model(model)
        kind = self.accelerator.distributed_type.value
        if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
            raise UserError(
                f"{type(self).__name__}: got weights that {kind} divides or holds, expected one process, or "
                f"several "
                "with the whole model each (DistributedDataParallel)"
            )
        if id(module) not in self._engines:
            # The module is called without its DistributedDataParallel, which then leaves gradients to the
            # engine.
            group = torch.distributed.group.WORLD if kind != "NO" else None
            self._engines[id(module)] = TreeEngine(module, process_group=group, **self._engine_options)
        return self._engines[id(module)]

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """TRL's method. input_ids, attention_mask: [S, T], padding on both sides. Returns log-probabilities
        and entropies of the last logits_to_keep tokens, [S, logits_to_keep], 0 at padding. batch_size is not
        needed: the plan bounds the memory."""
        given = sorted(name for name, value in images.items() if value is not None)
        if given:
            raise UserError(f"{type(self).__name__}: got {', '.join(given)}, expected a batch of text alone")
        is_scored = torch.zeros_like(attention_mask, dtype=torch.bool)
        is_scored[:, -logits_to_keep:] = attention_mask[:, -logits_to_keep:].bool()
        sequences = sequences_from_padded(input_ids, attention_mask, is_scored)
        log_probs, entropies = self._engine_of(model)(sequences, temperature=self.temperature)
        places = is_scored[:, -logits_to_keep:]

        def padded(values: Tensor) -> Tensor:
            return values.new_zeros(places.shape).masked_scatter(places, values)

        return padded(log_probs), padded(entropies) if compute_entropy else None, None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.keep_groups:
            return super()._prepare_inputs(generation_batch)
        module = sys.modules[
            next(c for c in type(self).__mro__ if c.__module__.startswith("trl.")).__module__
        ]
        with mock.patch.object(module, "shuffle_sequence_dict", self._shuffle_groups):
            return super()._prepare_inputs(generation_batch)

    def _shuffle_groups(self, batch: dict[str, Any]) -> dict[str, Any]:
        """TRL's shuffle_sequence_dict for whole groups of num_generations samples."""
        groups = torch.randperm(len(batch["prompt_ids"]) // self.num_generations)
        order = (groups.unsqueeze(1) * self.num_generations + torch.arange(self.num_generations)).flatten()

        def ordered(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dim() > 0:
                return value[order.to(value.device)]
            return [value[i] for i in order.tolist()] if isinstance(value, list) else value

        return {key: ordered(value) for key, value in batch.items()}


class TreeGRPOTrainer(TreeTrainerMixin, GRPOTrainer):
    """trl.GRPOTrainer over prefix trees."""


class TreeRLOOTrainer(TreeTrainerMixin, RLOOTrainer):
    """trl.RLOOTrainer over prefix trees."""
