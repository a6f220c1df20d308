"""A model's weights and adapters as the engine reads them, and whether it can."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bough.native import UserError, classes, raises_user_errors

_BACKBONE = re.compile(r"(ForTokenClassification|ForSequenceClassification|(?:Text)?(?<!Head)Model)$")
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64"}
_WRAPPERS = {  # class names, so that nothing is imported
    "DistributedDataParallel": "DistributedDataParallel; give the engine model.module and process_group=, so "
    "that it averages the gradients itself",
    "FullyShardedDataParallel": "FSDP, which divides weights among processes",
    "DeepSpeedEngine": "DeepSpeed, which holds weights and gradients of its own",
    "DataParallel": "DataParallel; give the engine model.module",
}


@dataclass(frozen=True)
class Support:
    """Whether the engine can compute a model; true or false in conditions. reason: why not, empty if it
    can."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Part:
    """A parameter of the user's model: rows [begin, end) of the engine's parameter `index`."""

    name: str
    parameter: torch.nn.Parameter
    index: int
    begin: int
    end: int


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model behind torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)


def _is_peft(model: torch.nn.Module) -> bool:
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def _base(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model, within PEFT's wrapper or not."""
    return model.get_base_model() if _is_peft(model) else model


def _named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The weights without adapters and without a classifier's head, by their Hugging Face names in a causal
    language model. Tied weights have both names."""
    base = _base(model)
    prefix = "" if hasattr(base, "model") else "model."
    takes_all = bool(prefix) or has_lm_head(model)
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if ".lora_" not in name and (takes_all or name.startswith("model.")):
            yield prefix + name.replace(".base_layer.", "."), parameter


def _config_text(model: torch.nn.Module) -> str:
    base = _base(model)
    config = json.loads(base.config.to_json_string(use_diff=False))
    config["architectures"] = [_BACKBONE.sub("ForCausalLM", type(base).__name__)]
    return json.dumps(config)


def has_lm_head(model: torch.nn.Module) -> bool:
    """False for a backbone alone, and for a classifier, whose head the user runs."""
    return not _BACKBONE.search(type(_base(model)).__name__)


def _make_native(model: torch.nn.Module) -> tuple[Any, torch.dtype, torch.device]:
    """The engine without weights. Raises UserError if it cannot compute the model."""
    kind = type(model).__name__
    if kind in _WRAPPERS:
        raise UserError(f"got a model wrapped in {_WRAPPERS[kind]}")
    base = _base(model)
    if not hasattr(base, "config") or not hasattr(base.config, "to_json_string"):
        raise UserError(f"got {type(base).__name__}, expected a model of transformers with its config")
    named = dict(_named_weights(model))
    kinds = {(parameter.dtype, parameter.device) for parameter in named.values()}
    if any(type(p).__name__ == "DTensor" or type(p.data).__name__ == "DTensor" for p in named.values()):
        raise UserError(
            "got weights that are divided among processes (DTensor, FSDP), expected whole weights"
        )
    if len(kinds) != 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise UserError(
            f"got weights of several dtypes or devices ({listed}), expected one; load the model with one "
            "dtype and without device_map"
        )
    dtype, device = kinds.pop()
    if dtype not in DTYPES:
        raise UserError(
            f"got weights of {dtype}, expected float32, bfloat16 or float64; quantized weights are refused"
        )
    if device.type not in ("cpu", "cuda") or (
        device.type == "cuda" and device.index != torch.cuda.current_device()
    ):
        raise UserError(
            f"got weights on {device}, expected the CPU or the current CUDA device; call "
            f"torch.cuda.set_device first"
        )
    native = raises_user_errors(classes().TreeEngine)(
        _config_text(model), DTYPES[dtype], device.type, has_lm_head(model)
    )
    expected = set(native.parts(False)[0])
    if any(".experts." in name for name in expected):
        raise UserError(
            f"got {type(base).__name__}, a mixture of experts; expected a dense model (`bough train` and "
            "`bough sft` train mixtures)"
        )
    if missing := sorted(expected - named.keys()):
        raise UserError(
            f"the model has no weight {missing[0]!r}, which its config asks for ({len(missing)} missing)"
        )
    tied = has_lm_head(model) and bool(getattr(base.config, "tie_word_embeddings", False))
    extra = sorted(named.keys() - expected - ({"lm_head.weight"} if tied else set()))
    if extra:
        raise UserError(
            f"the model has the weight {extra[0]!r}, which no {type(base).__name__} has ({len(extra)} extra)"
        )
    if tied and named.get("lm_head.weight") is not named["model.embed_tokens.weight"]:
        raise UserError(
            "config.tie_word_embeddings is true, but lm_head.weight is another tensor than the embedding"
        )
    return native, dtype, device


def supports(model: torch.nn.Module) -> Support:
    """Whether TreeEngine can compute the model, and if not, why: family, config, dtype, wrapper, adapters."""
    model = unwrapped(model)
    try:
        Adapters(model).check()
        _make_native(model)
    except UserError as error:
        return Support(str(error))
    return Support()


class Weights:
    """Gives the engine the model's weights, and keeps the two the same tensors (or copies, with `copies`)."""

    def __init__(self, model: torch.nn.Module, copies: bool) -> None:
        native, self.dtype, self.device = _make_native(model)
        self._natives = [native]
        self.accumulator = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._model, self._copies = model, copies
        named = dict(_named_weights(model))
        self.parts = [
            Part(name, named[name], index, begin, end)
            for name, index, begin, end in zip(*native.parts(False), strict=True)
        ]
        self._shapes = native.shapes(False)
        self._by_parameter: list[list[Part]] = [[] for _ in self._shapes]
        for part in self.parts:
            self._by_parameter[part.index].append(part)
        self._values: list[Tensor | None] = [None] * len(self._by_parameter)
        self.refresh()

    @property
    def copied_bytes(self) -> int:
        """The memory of the copies; 0 if the model's own weights are used."""
        return sum(value.nbytes for value in self._values if value is not None) if self._copies else 0

    @property
    def native(self) -> Any:
        """The engine of the weights without adapters."""
        return self._natives[0]

    def another_native(self) -> Any:
        """One more engine of the same weights."""
        native, _, _ = _make_native(self._model)
        for index, value in enumerate(self._values):
            native.set_weight(False, index, value)
        self._natives.append(native)
        return native

    def _set(self, index: int, value: Tensor) -> None:
        for native in self._natives:
            native.set_weight(False, index, value)
        self._values[index] = value

    def refresh(self) -> None:
        """Makes the engine read the weights as they are now: binds those whose memory is another one."""
        self._check_parameters()
        for index, parts in enumerate(self._by_parameter):
            if self._copies:
                self._copy(index, parts)
            elif not self._is_bound(index, parts):
                self._bind(index, parts)

    def check_unmoved(self) -> None:
        """Raises if a weight has other memory than at the last refresh()."""
        for index, parts in enumerate(self._by_parameter):
            if not self._copies and not self._is_bound(index, parts):
                raise UserError(
                    f"TreeEngine: {parts[0].name} was moved between forward and backward (by .to() or an "
                    "assignment); call backward before"
                )

    def _check_parameters(self) -> None:
        for part in self.parts:
            parameter = part.parameter
            if parameter.dtype != self.dtype or parameter.device != self.device:
                raise UserError(
                    f"TreeEngine: {part.name} is now {parameter.dtype} on {parameter.device}, but the "
                    f"engine was made for {self.dtype} on {self.device}; make a new TreeEngine after .to() "
                    "or .half()"
                )
        named = dict(_named_weights(self._model))
        for part in self.parts:
            if named.get(part.name) is not part.parameter:
                raise UserError(
                    f"TreeEngine: {part.name} is another Parameter than when the engine was made (was a "
                    "module replaced?); make a new TreeEngine"
                )

    def _is_bound(self, index: int, parts: list[Part]) -> bool:
        value = self._values[index]
        if value is None:
            return False
        row_bytes = value.stride(0) * value.element_size()
        return all(
            part.parameter.data_ptr() == value.data_ptr() + part.begin * row_bytes
            and part.parameter.is_contiguous()
            for part in parts
        )

    def _bind(self, index: int, parts: list[Part]) -> None:
        shape = self._shapes[index]
        if len(parts) == 1 and parts[0].parameter.is_contiguous():
            value = parts[0].parameter.data
        else:
            value = self._joined(shape, parts)
        if list(value.shape) != shape:
            raise UserError(f"TreeEngine: {parts[0].name}: got shape {list(value.shape)}, expected {shape}")
        self._set(index, value)

    def _joined(self, shape: list[int], parts: list[Part]) -> Tensor:
        """One matrix of which the parts are views. If another engine has made them views already, its
        matrix."""
        first = parts[0].parameter.data
        whole = torch.empty(0, dtype=self.dtype, device=self.device)
        row_bytes = first[0].numel() * first.element_size()
        storage = first.untyped_storage()
        if (
            all(
                part.parameter.untyped_storage().data_ptr() == storage.data_ptr()
                and part.parameter.data_ptr() == first.data_ptr() + part.begin * row_bytes
                for part in parts
            )
            and storage.nbytes() >= first.storage_offset() * first.element_size() + shape[0] * row_bytes
        ):
            return whole.set_(storage, first.storage_offset(), shape)
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        for part in parts:
            if part.parameter.shape != whole[part.begin : part.end].shape:
                raise UserError(
                    f"TreeEngine: {part.name}: got shape {list(part.parameter.shape)}, expected "
                    f"{list(whole[part.begin : part.end].shape)}"
                )
            whole[part.begin : part.end].copy_(part.parameter.data)
            part.parameter.data = whole[part.begin : part.end]
        return whole

    def _copy(self, index: int, parts: list[Part]) -> None:
        value = self._values[index]
        if value is None:
            value = torch.empty(self._shapes[index], dtype=self.dtype, device=self.device)
            self._set(index, value)
        with torch.no_grad():
            for part in parts:
                value[part.begin : part.end].copy_(part.parameter)


class Adapters:
    """PEFT's LoRA adapters. They are small, so the engine gets a copy of the active ones at each call, in the
    model's dtype, and never reads stale values. Their gradients are not rounded to that dtype.

    Each set of active adapters has an engine of its own: a call with another set (the reference policy) must
    not change the one that waits for its backward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._natives: dict[tuple[Any, ...], Any] = {}

    def check(self) -> None:
        """Raises UserError if the adapters, as they are now, are of a kind that the engine does not
        compute."""
        if active := self.active():
            self._rank_and_scale(active)

    def bind(self, weights: Weights) -> tuple[Any, list[Part] | None]:
        """The engine with the adapters that are active now, and their parts. Without any: None."""
        active = self.active()
        if not active:
            return weights.native, None
        rank, scale = self._rank_and_scale(active)
        key = (rank, scale, tuple((module, adapter) for module, (_, adapter) in sorted(active.items())))
        if (native := self._natives.get(key)) is None:
            native = weights.another_native()
            raises_user_errors(native.set_adapted_modules)(sorted(active), rank, scale)
            self._natives[key] = native
        parts = []
        values = [
            torch.empty(shape, dtype=weights.dtype, device=weights.device) for shape in native.shapes(True)
        ]
        for name, index, begin, end in zip(*native.parts(True), strict=True):
            module = name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0]
            layer, adapter = active[module]
            factor = layer.lora_A if name.endswith(".lora_A.weight") else layer.lora_B
            parameter = factor[adapter].weight
            values[index][begin:end].copy_(parameter.data)
            parts.append(Part(name, parameter, index, begin, end))
        for index, value in enumerate(values):
            native.set_weight(True, index, value)
        return native, parts

    def _rank_and_scale(self, active: dict[str, tuple[Any, str]]) -> tuple[int, float]:
        kinds = {(layer.r[adapter], float(layer.scaling[adapter])) for layer, adapter in active.values()}
        if len(kinds) > 1:
            raise UserError(
                f"adapters of several ranks or scales are active ({', '.join(map(str, sorted(kinds)))}), "
                "expected one; rank_pattern and alpha_pattern are not supported"
            )
        return kinds.pop()

    def active(self) -> dict[str, tuple[Any, str]]:
        """The module's name to its layer and the name of its active adapter. Raises UserError for other
        kinds."""
        modules = dict(_base(self._model).named_modules())
        if not _is_peft(self._model):
            if adapted := [name for name, module in modules.items() if hasattr(module, "base_layer")]:
                raise UserError(
                    f"{adapted[0]} has an adapter; expected the model that PEFT returned (get_peft_model), "
                    "from which the active adapter is read"
                )
            return {}
        lora_layer = sys.modules["peft"].tuners.lora.LoraLayer
        for name, module in modules.items():
            kind = type(module).__name__
            if kind in ("ModulesToSaveWrapper", "TrainableTokensWrapper"):
                raise UserError(
                    f"{name} is trained beside the adapter (modules_to_save); expected adapters alone"
                )
            if hasattr(module, "base_layer") and not isinstance(module, lora_layer):
                raise UserError(
                    f"{name} has an adapter of type {kind}, expected PEFT's LoRA on linear layers"
                )
        active = {}
        for name, layer in modules.items():
            if not isinstance(layer, lora_layer):
                continue
            if layer.disable_adapters or layer.merged:
                continue
            if any(adapter in layer.lora_embedding_A for adapter in layer.active_adapters):
                raise UserError(
                    f"{name} is an embedding with an adapter, expected adapters on linear layers alone"
                )
            names = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
            if len(names) > 1:
                raise UserError(f"{name}: got the active adapters {', '.join(names)}, expected one")
            if not names:
                continue
            adapter = names[0]
            if layer.use_dora.get(adapter, False) or adapter in getattr(layer, "lora_magnitude_vector", {}):
                raise UserError(f"{name}: got DoRA, expected plain LoRA")
            if getattr(layer, "lora_bias", {}).get(adapter, False):
                raise UserError(f"{name}: got a LoRA with a bias, expected one without")
            dropout = layer.lora_dropout[adapter]
            if layer.training and getattr(dropout, "p", 0) > 0:
                raise UserError(
                    f"{name}: got lora_dropout {dropout.p}, expected 0: with dropout, tokens that sequences "
                    "share would have other values in each; set lora_dropout=0 in LoraConfig, or call "
                    "model.eval()"
                )
            active[name] = (layer, adapter)
        return active
