"""verl's training engine over prefix trees: the strategy "bough" of verl 0.9.

verl finds this module by its entry point and registers the engines for language and value models. They
compute what verl's FSDP engine computes, on a CPU or a GPU. Each process has the whole model and computes its
share of a batch; gradients are averaged, as FSDP does. Log-probabilities, entropies and values come from a
TreeEngine, over the tree of a whole mini-batch: verl's micro-batches would cut the tree, and the plan bounds
the memory.
"""

from __future__ import annotations

# The platform comes before the modules of verl that ask for it when they are imported.
import bough.verl_platform  # noqa: F401  # isort: skip

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import collect_lora_params, replace_lora_wrapper
from verl.utils.py_functional import append_to_dict
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.utils import detach_tree

from bough.native import UserError
from bough.tree_engine import TreeEngine
from bough.verl_checkpoints import Checkpoints, merged_weights
from bough.verl_settings import (
    BATCH_VALUES,
    CHECKPOINT_VALUES,
    ENGINE_VALUES,
    MODEL_VALUES,
    refuse,
)
from bough.verl_settings import BoughEngineConfig as BoughEngineConfig


class BoughEngine(FSDPEngine):
    """FSDPEngine with whole models and a TreeEngine. Inherited: optimizer, schedule, clipping, modes.

    module: the weights that the optimizer changes, in model_dtype. _compute: the weights that the TreeEngine
    reads, in mixed_precision.param_dtype. They are one module if the dtypes are equal. Otherwise _compute is
    a copy, which every optimizer step refreshes. Gradients are summed in fp32 over the mini-batch.

    With LoRA they are PEFT's models. The reference policy is the model with its adapter disabled.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        refuse("engine_config", engine_config, ENGINE_VALUES)
        refuse("model_config", model_config, MODEL_VALUES)
        refuse("checkpoint_config", checkpoint_config or {}, CHECKPOINT_VALUES)
        if model_config.lora_adapter_path is not None and model_config.lora_rank <= 0:
            raise UserError(
                f"model_config.lora_adapter_path: got {model_config.lora_adapter_path!r} with lora_rank "
                f"{model_config.lora_rank}, which switches adapters off; set lora_rank to the adapter's rank"
            )
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _init_device_mesh(self) -> None:
        self.ulysses_device_mesh = self.ulysses_parallel_group = None
        self.ulysses_sequence_parallel_size = 1

    def initialize(self) -> None:
        """Loads the model. Without forward_only: makes the optimizer and its schedule."""
        master, compute = self._dtypes()
        self.module = self._load(compute if self.engine_config.forward_only else master).to(get_device_id())
        if self._is_lora:
            self.module = self._build_lora_module(self.module)
            adapter = self.module.peft_config["default"]
            refuse("lora_adapter_path", vars(adapter), {"lora_dropout": (0.0,)})
        group = self.get_data_parallel_group() if self.get_data_parallel_size() > 1 else None
        if group is not None:  # adapters and a new value head are random
            for weight in self.module.parameters():
                if weight.requires_grad:
                    torch.distributed.broadcast(weight.data, src=0, group=group)
        self._compute = self.module
        if next(self.module.parameters()).dtype != compute:
            self._compute = deepcopy(self.module).to(compute)
        self._tree = TreeEngine(
            self._compute,
            memory=self.engine_config.get("memory"),
            max_tokens_per_pass=self.engine_config.get("max_tokens_per_pass"),
            strategy=self.engine_config.get("plan_strategy", "auto"),
            fp32_sums=self._compute is not self.module,
            process_group=group,
        )
        self.optimizer = self.lr_scheduler = None
        if not self.engine_config.forward_only:
            self.optimizer = self._build_optimizer(self.module)
            self.lr_scheduler = self._build_lr_scheduler(self.optimizer)
        self.checkpoint_manager = Checkpoints(self)

    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the optimizer's and of the TreeEngine's weights. verl's defaults: fp32, bf16."""
        mixed = self.engine_config.mixed_precision or {}
        for name in ("reduce_dtype", "buffer_dtype"):
            if PrecisionType.to_dtype(mixed.get(name, "fp32")) != torch.float32:
                raise UserError(
                    f"engine_config.mixed_precision.{name}: got {mixed[name]!r}, expected 'fp32': gradients "
                    "are summed and rotary tables computed in fp32"
                )
        found = []
        for name, value in (
            ("model_dtype", self.engine_config.model_dtype or "fp32"),
            ("mixed_precision.param_dtype", mixed.get("param_dtype", "bf16")),
        ):
            found.append(PrecisionType.to_dtype(value))
            if found[-1] not in (torch.float32, torch.bfloat16):
                raise UserError(f"engine_config.{name}: got {value!r}, expected 'fp32' or 'bf16'")
        return found[0], found[1]

    def _load(self, dtype: torch.dtype) -> torch.nn.Module:
        from verl.utils.model import get_hf_auto_model_class

        config = self.model_config.hf_config
        # verl's default is flash_attention_2, which may be missing. No attention of transformers runs.
        options = {"config": config, "dtype": dtype, "attn_implementation": "eager"}
        auto_class = get_hf_auto_model_class(hf_config=config)
        module = auto_class.from_pretrained(self.model_config.local_path, **options)
        return module.to(dtype)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """One forward over all sequences of the batch, verl's loss of them together, one backward."""
        given = {name: tu.get_non_tensor_data(data, name, values[0]) for name, values in BATCH_VALUES.items()}
        refuse("data", given, BATCH_VALUES)
        data = data.to(get_device_id())
        num_tokens = data["loss_mask"].sum()
        torch.distributed.all_reduce(num_tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(
            data, sp_size=1, dp_size=self.get_data_parallel_size(), batch_num_tokens=num_tokens.item()
        )
        keep_output = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        with torch.set_grad_enabled(not forward_only):
            output = self._model_output(data, _Batch(data))
            loss, metrics = torch.tensor(1.0), {}
            if loss_function is not None:
                loss, metrics = loss_function(
                    model_output=output, data=data, dp_group=self.get_data_parallel_group()
                )
            if not forward_only:
                loss.backward()
                self._collect_gradients()
        lists: dict[str, Any] = {}
        append_to_dict(lists, metrics)
        return {
            "model_output": detach_tree(output) if keep_output else {},
            "loss": [loss.detach().item()],
            "metrics": lists,
        }

    def _model_output(self, data: TensorDict, batch: _Batch) -> dict[str, Tensor]:
        """log_probs and entropy (if asked for), in verl's layout (_Batch.nested)."""
        temperature = data["temperature"]
        if isinstance(temperature, Tensor):
            if temperature.unique().numel() != 1:
                raise UserError("data.temperature: got several values, expected one for all sequences")
            temperature = temperature.flatten()[0].item()
        log_probs, entropies = self._tree(batch.sequences, temperature=float(temperature))
        output = {"log_probs": batch.nested(log_probs)}
        if tu.get_non_tensor_data(data, "calculate_entropy", False):
            output["entropy"] = batch.nested(entropies)
        return output

    def _collect_gradients(self) -> None:
        """Adds the gradients of the TreeEngine's weights to those of the optimizer's."""
        if self._compute is self.module:
            return
        for weight, source in zip(self.module.parameters(), self._compute.parameters(), strict=True):
            total = getattr(source, "main_grad", None)
            total = source.grad if total is None else total
            source.main_grad = source.grad = None
            if total is not None:
                total = total.to(weight.dtype)
                weight.grad = total if weight.grad is None else weight.grad.add_(total)

    def optimizer_step(self) -> float:
        norm = super().optimizer_step()
        self.refresh()
        return norm

    def refresh(self) -> None:
        """Copies the optimizer's weights to the TreeEngine's."""
        if self._compute is self.module:
            return
        with torch.no_grad():
            for weight, copy in zip(self.module.parameters(), self._compute.parameters(), strict=True):
                if weight.requires_grad:
                    copy.copy_(weight)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Does nothing: weights, gradients and optimizer stay on the device."""
        if (model or optimizer) and device != (name := get_device_name()):
            raise UserError(f"to: got {device!r}, expected {name!r}: the strategy bough offloads nothing")

    def disable_adapter(self) -> AbstractContextManager[Any]:
        return self._compute.disable_adapter()

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Names and weights for the rollout engine. With LoRA: the adapter and its configuration if
        base_sync_done, else the base weights; with lora.merge, the base weights plus the adapter."""
        if not self._is_lora:
            return ((name, value.detach()) for name, value in self.module.state_dict().items()), None
        if self.model_config.lora.get("merge", False):
            return merged_weights(self.module), None
        adapter = self.module.peft_config["default"]
        weights = collect_lora_params(self.module, layered_summon, base_sync_done)
        if not base_sync_done:
            weights = {replace_lora_wrapper(name, adapter): value for name, value in weights.items()}
        return iter(weights.items()), adapter.to_dict()

    def get_per_tensor_param_shard(self, **kwargs: Any) -> Any:
        raise UserError("checkpoint engines that send changed elements are refused by the strategy bough")

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes local_path/huggingface (weights, config, tokenizer), optimizer.pt, and each process its
        extra_rank_N.pt (schedule, random states), according to save_contents. With LoRA: the adapter to
        lora_adapter, and with hf_model base weights plus adapter to huggingface."""
        self.checkpoint_manager.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Reads what save_checkpoint wrote, according to load_contents. Nothing is deleted."""
        self.checkpoint_manager.load_checkpoint(local_path, hdfs_path)
        self.refresh()


@EngineRegistry.register(model_type="language_model", backend="bough", device=["cpu", "cuda"])
class BoughEngineWithLMHead(BoughEngine):
    """The policy, or its reference with forward_only."""


@EngineRegistry.register(model_type="value_model", backend="bough", device=["cpu", "cuda"])
class BoughEngineWithValueHead(BoughEngine):
    """The critic: a token classifier of transformers with one label. verl builds no adapters for it."""

    def __init__(self, model_config: Any, *configs: Any, **named: Any) -> None:
        refuse("model_config", model_config, {"lora_rank": (0,)})
        super().__init__(model_config, *configs, **named)

    def _load(self, dtype: torch.dtype) -> torch.nn.Module:
        from transformers import AutoModelForTokenClassification

        config = deepcopy(self.model_config.hf_config)
        config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, 0.0
        module = AutoModelForTokenClassification.from_pretrained(
            self.model_config.local_path, config=config, dtype=dtype, attn_implementation="eager"
        )
        if not isinstance(getattr(module, "score", None), torch.nn.Linear):
            raise UserError(
                f"value_model: got {type(module).__name__}, expected a model with the linear layer `score`"
            )
        return module.to(dtype)

    def initialize(self) -> None:
        super().initialize()
        if self.get_data_parallel_size() > 1:  # autograd computes the gradients of the head
            for parameter in self._compute.score.parameters():
                parameter.register_hook(self._average)

    def _average(self, gradient: Tensor) -> Tensor:
        total = gradient.float()
        torch.distributed.all_reduce(total, group=self.get_data_parallel_group())
        return total.div_(self.get_data_parallel_size()).to(gradient.dtype)

    def _model_output(self, data: TensorDict, batch: _Batch) -> dict[str, Tensor]:
        values = self._compute.score(self._tree.hidden_states(batch.sequences)).squeeze(-1)
        return {"values": batch.nested(values)}


class _Batch:
    """Sequences of verl's batch. input_ids: nested [S, T]. The trained tokens are those of the responses; in
    a batch without responses (supervised training), those of loss_mask."""

    def __init__(self, data: TensorDict) -> None:
        if len(data.get("multi_modal_inputs", [])) and any(map(bool, data["multi_modal_inputs"])):
            raise UserError("data.multi_modal_inputs: got some, expected a batch of text alone")
        ids = data["input_ids"]
        if not ids.is_nested:
            raise UserError("data.input_ids: got a padded tensor, expected a nested one")
        self.offsets = ids.offsets()
        lengths = self.offsets.diff()
        position = torch.arange(ids.values().numel(), device=ids.device)
        position -= self.offsets[:-1].repeat_interleave(lengths)
        positions = data.get("position_ids", None)
        if positions is not None and not torch.equal(positions.values(), position):
            raise UserError("data.position_ids: expected 0, 1, ... in each sequence, one dimension")
        trained = self._trained(data, position, lengths)
        self.places = trained.nonzero().squeeze(1) - 1  # verl stores a token's value at the token before
        bounds, tokens, mask = self.offsets.tolist(), ids.values().cpu(), trained.cpu()
        self.sequences = [
            {"input_ids": tokens[begin:end], "loss_mask": mask[begin:end]}
            for begin, end in zip(bounds, bounds[1:], strict=False)
        ]

    @staticmethod
    def _trained(data: TensorDict, position: Tensor, lengths: Tensor) -> Tensor:
        if "responses" in data:
            responses = data["responses"]
            if responses.is_nested:
                num_response = responses.offsets().diff()
            else:
                num_response = data["attention_mask"][:, -responses.shape[1] :].sum(dim=1)
            return position >= (lengths - num_response).repeat_interleave(lengths)
        mask = data["loss_mask"]
        if not mask.is_nested or mask.values().shape != position.shape:
            raise UserError("data: has no responses, and loss_mask is not as long as input_ids")
        return mask.values() != 0

    def nested(self, values: Tensor) -> Tensor:
        """Values of the trained tokens in verl's layout, nested [S, T]; 0 elsewhere."""
        flat = values.new_zeros(int(self.offsets[-1])).index_copy(0, self.places, values)
        return torch.nested.nested_tensor_from_jagged(flat, self.offsets)
