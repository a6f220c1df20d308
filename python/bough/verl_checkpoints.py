"""Checkpoints of verl's engine "bough", in the formats of Hugging Face and PEFT."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from bough.native import UserError
from bough.verl_settings import refuse


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Base weights plus adapter of a PEFT model, by the base model's names. The model is unchanged."""
    base = model.get_base_model()
    for name, value in base.state_dict().items():
        module, is_adapted, kind = name.partition(".base_layer.")
        if is_adapted and kind == "weight":
            value = value + base.get_submodule(module).get_delta_weight("default")
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), value.detach()


class Checkpoints(BaseCheckpointManager):
    """Checkpoints of a BoughEngine."""

    def __init__(self, engine: Any) -> None:
        super().__init__(
            engine.module,
            engine.optimizer,
            engine.lr_scheduler,
            engine.model_config.get_processor(),
            engine.checkpoint_config,
        )
        self._is_lora = hasattr(self.model, "peft_config")

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        refuse("save_checkpoint", {"hdfs_path": hdfs_path}, {"hdfs_path": (None,)})
        if self.rank == 0:
            self.ensure_checkpoint_capacity(max_ckpt_to_keep)
            self._save_model(local_path)
            if self.should_save_optimizer and self.optimizer is not None:
                torch.save(self.optimizer.state_dict(), os.path.join(local_path, "optimizer.pt"))
        torch.distributed.barrier()  # the folder exists
        if self.should_save_extra:
            random = self.get_rng_state()
            name, keys, *others = random["numpy"]
            random["numpy"] = (name, keys.tolist(), *others)  # arrays are no plain data for torch.load
            schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
            torch.save({"lr_scheduler": schedule, "rng": random}, self._extra_file(local_path))
        if self.rank == 0:
            self.register_checkpoint(local_path, max_ckpt_to_keep)
        torch.distributed.barrier()

    def _extra_file(self, local_path: str) -> str:
        return os.path.join(local_path, f"extra_rank_{self.rank}.pt")

    def _save_model(self, local_path: str) -> None:
        folder = os.path.join(local_path, "huggingface")
        os.makedirs(folder, exist_ok=True)
        has_model = self.should_save_model or self.should_save_hf_model
        if self._is_lora:
            if has_model:
                self.model.save_pretrained(os.path.join(local_path, "lora_adapter"))
            if self.should_save_hf_model:
                weights = dict(merged_weights(self.model))
                self.model.get_base_model().save_pretrained(folder, state_dict=weights)
        elif has_model:
            self.model.save_pretrained(folder)
        self.model.config.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        if local_path is None:
            return
        refuse("load_checkpoint", {"hdfs_path": hdfs_path}, {"hdfs_path": (None,)})
        if self.should_load_model or self.should_load_hf_model:
            self._load_model(local_path)
        if self.should_load_optimizer and self.optimizer is not None:
            path = os.path.join(local_path, "optimizer.pt")
            self.optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        if self.should_load_extra:
            extra = torch.load(self._extra_file(local_path), weights_only=True)
            self.load_rng_state(extra["rng"])
            if self.lr_scheduler is not None and extra["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])

    def _load_model(self, local_path: str) -> None:
        if self._is_lora:
            from peft import load_peft_weights, set_peft_model_state_dict

            weights = load_peft_weights(os.path.join(local_path, "lora_adapter"), device="cpu")
            result = set_peft_model_state_dict(self.model, weights)
            wrong = [*result.unexpected_keys, *(name for name in result.missing_keys if ".lora_" in name)]
            if wrong:
                raise UserError(
                    f"{local_path}/lora_adapter: got other modules than the engine adapts: {wrong[0]}"
                )
            return
        folder, dtype = os.path.join(local_path, "huggingface"), self.model.dtype
        saved = type(self.model).from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        self.model.load_state_dict(saved.state_dict())
