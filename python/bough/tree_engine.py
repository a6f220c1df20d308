"""TreeEngine: log-probabilities and gradients of a transformers model over the prefix tree of a batch."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bough.native import UserError, raises_user_errors
from bough.sequences import Flat, flatten
from bough.weights import Adapters, Part, Weights, has_lm_head, supports, unwrapped
from bough.weights import Support as Support

_STRATEGIES = ("auto", "dense", "packed", "path", "blocks")
_COUPLES = ("token", "sequence", "batch")
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int)


@dataclass(frozen=True)
class StepResult:
    """loss: the sum of what loss_fn returned. log_probs, entropies: [R], fp32 (fp64 for an fp64 model), on
    the model's device. plan: the plan that was executed."""

    loss: float
    log_probs: Tensor
    entropies: Tensor
    plan: dict[str, Any]


class TreeEngine:
    """Computes log-probabilities, entropies and gradients of a causal language model of transformers. Tokens
    that several sequences of a batch share are computed once, forward and backward. Values and gradients are
    those of each sequence alone (docs/numerics.md).

    Args:
        model: a transformers model of a family in docs/models.md, with or without PEFT's LoRA adapters.
            `bough.supports(model)` says whether and why not. The engine computes in the dtype of its weights
            (float32, bfloat16 or float64), also under autocast, and without dropout.
        copy: False: the engine uses the model's own weights. Weights that it holds as one matrix (q, k, v;
            gate, up) become views of that matrix, with the same names, shapes and values. True: the engine
            copies the weights at each call, which takes their memory once more.
        memory: the most bytes that a call may take beyond weights and gradients, such as 8e9. None: on a GPU
            all that is free; on a CPU no limit, except half of what is free for held activations (__call__).
        max_tokens_per_pass: the most tokens that go through the model at once. None: by device.
        strategy: how a batch is planned (docs/plans.md): auto, blocks, packed, path or dense.
        fp32_sums: True: gradients of several calls (micro-batches) are added in fp32, to the attribute
            main_grad of each parameter instead of .grad. write_gradients() rounds the sums and adds them to
            .grad. For models in bfloat16, whose .grad would be rounded after each call. Hooks of parameters
            are not called.
        process_group: a group of torch.distributed whose processes train the same model, each on its own
            sequences. Gradients are averaged over the group in each backward and step(), in fp32, so all
            processes must make the same calls. For a model in DistributedDataParallel give `model.module`: it
            then reduces nothing itself. None: gradients are those of this process.

    Raises:
        UserError: the model or an argument is not supported.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        copy: bool = False,
        memory: float | None = None,
        max_tokens_per_pass: int | None = None,
        strategy: str = "auto",
        fp32_sums: bool = False,
        process_group: Any = None,
    ) -> None:
        if not (support := supports(model)):
            raise UserError(f"TreeEngine: {support.reason}")
        if memory is not None and not (isinstance(memory, (int, float)) and memory >= 1):
            raise UserError(f"memory: got {memory!r}, expected a number of bytes, such as 8e9, or None")
        if max_tokens_per_pass is not None and not (
            isinstance(max_tokens_per_pass, int) and max_tokens_per_pass >= 1
        ):
            raise UserError(
                f"max_tokens_per_pass: got {max_tokens_per_pass!r}, expected a whole number from 1, or None"
            )
        if strategy not in _STRATEGIES:
            raise UserError(f"strategy: got {strategy!r}, expected one of {', '.join(_STRATEGIES)}")
        self.model = unwrapped(model)
        self._memory, self._max_tokens, self._strategy = int(memory or 0), max_tokens_per_pass or 0, strategy
        self._fp32_sums, self._process_group = fp32_sums, process_group
        self._weights = Weights(self.model, copies=copy)
        self._adapters = Adapters(self.model)
        self._call = _Call(self._weights.native, [], [])
        self._plan: dict[str, Any] = {}

    @property
    def last_plan(self) -> dict[str, Any]:
        """The plan of the last call: strategy, passes, tokens, tree_tokens, compression, work_ratio (W),
        predicted seconds and bytes (beyond weights and gradients), holds_activations (see __call__), and
        copied_weight_bytes (with copy=True)."""
        return dict(self._plan)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the engine's tensors in its last computation, over those before it."""
        return self._call.native.peak_bytes()

    def __call__(self, sequences: Iterable[Any], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the trained tokens.

        Args:
            sequences: a list of (prompt, response) or {"input_ids": ..., "loss_mask": ...}, in token ids.
            temperature: the logits are divided by it.

        Returns:
            log_probs, entropies: [R] each, one per trained token, sequence after sequence; fp32 (fp64 for an
            fp64 model), on the model's device. With gradients enabled, they are differentiable once: backward
            adds to the parameters' .grad like any other backward. Gradients are summed in fp32 and rounded to
            the parameter's dtype once. Between forward and backward the activations are held if `memory`
            allows; otherwise the forward runs twice.

        Raises:
            UserError: wrong input. The model and its gradients are unchanged.
        """
        self._needs_lm_head()
        call, batch = self._prepare_values(sequences, temperature)
        compute, device = raises_user_errors(call.native.forward), self._weights.device
        if not call.parameters:
            log_probs, entropies = compute(batch, False)
            return log_probs.to(device), entropies.to(device)
        return _LogProbs.apply(self._weights, call, batch, *call.parameters)

    def hidden_states(self, sequences: Iterable[Any]) -> Tensor:
        """Final hidden states from which the trained tokens are predicted: [R, D], in the model's dtype, on
        its device. With gradients enabled, differentiable like the log-probabilities. For heads of your own,
        such as a critic's: `values = model.score(engine.hidden_states(sequences)).squeeze(-1)`. The model may
        be a classifier of transformers (ForTokenClassification, ForSequenceClassification) or a backbone.

        Args and errors: as in __call__.
        """
        call, batch = self._prepare_values(sequences, temperature=1.0)
        if not call.parameters:
            return raises_user_errors(call.native.hidden)(batch, False)
        return _HiddenStates.apply(self._weights, call, batch, *call.parameters)

    def step(
        self,
        sequences: Iterable[Any],
        loss_fn: Callable[[Tensor, Tensor, Tensor], Tensor],
        *,
        couples: str = "token",
        temperature: float = 1.0,
    ) -> StepResult:
        """Adds the gradient of a loss to the parameters' .grad. loss_fn runs inside the plan's execution, so
        the forward runs once and no more than one pass's activations are held.

        Args:
            sequences: as in __call__.
            loss_fn: loss_fn(log_probs, entropies, rows) returns a scalar. log_probs, entropies: [r] each, of
                some of the trained tokens. rows: int64 [r], the indices of these tokens among all R trained
                tokens of the batch, so `advantages[rows]` are their advantages. The losses of all calls are
                added, so a mean must divide by the count of the whole batch.
            couples: the tokens that one call of loss_fn must get together: "token" (any), "sequence" (all
                trained tokens of a sequence) or "batch" (all).
            temperature: the logits are divided by it.

        Raises:
            UserError: wrong input. Exceptions of loss_fn are raised unchanged. In both cases .grad is
            unchanged.
        """
        if couples not in _COUPLES:
            raise UserError(f"couples: got {couples!r}, expected one of {', '.join(_COUPLES)}")
        self._needs_lm_head()
        flat = flatten(sequences)
        call = self._prepare(needs_gradients=True)
        batch = self._make_batch(call, flat, temperature, separate=False)
        loss_call = _LossCall(call.native, loss_fn)
        try:
            loss, log_probs, entropies = raises_user_errors(call.native.step)(
                batch, loss_call.address, couples
            )
        except Exception:
            if loss_call.error is not None:
                raise loss_call.error from None
            raise
        if not loss_call.has_graph and batch.num_rows() > 0:
            raise UserError(
                "loss_fn: got losses that do not depend on log_probs or entropies (they have no grad_fn), "
                "expected a differentiable function of them"
            )
        for parameter, gradient in zip(call.parameters, call.gradients(), strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        device = self._weights.device
        return StepResult(loss, log_probs.to(device), entropies.to(device), self.last_plan)

    def write_gradients(self) -> None:
        """With fp32_sums: rounds each parameter's main_grad to its dtype, adds it to .grad and sets main_grad
        to None. Call it before the optimizer's step."""
        for parameter in self.model.parameters():
            total = getattr(parameter, "main_grad", None)
            if total is None:
                continue
            rounded = total.to(parameter.dtype)
            parameter.grad = rounded if parameter.grad is None else parameter.grad.add_(rounded)
            parameter.main_grad = None

    def plan(self, sequences: Iterable[Any], *, separate: bool = False) -> dict[str, Any]:
        """The plan of a batch, without computing it (see last_plan). separate: the plan of __call__ with
        gradients, otherwise of step()."""
        call = self._prepare(needs_gradients=False)
        self._make_batch(call, flatten(sequences), 1.0, separate)
        return self.last_plan

    def _needs_lm_head(self) -> None:
        if not has_lm_head(self.model):
            raise UserError(
                f"TreeEngine: {type(self.model).__name__} has no lm_head, so there are no log-probabilities; "
                "expected hidden_states(), and a head of your own"
            )

    def _prepare_values(self, sequences: Iterable[Any], temperature: float) -> tuple[_Call, Any]:
        flat = flatten(sequences)
        call = self._prepare(needs_gradients=torch.is_grad_enabled())
        return call, self._make_batch(call, flat, temperature, separate=bool(call.parameters))

    def _prepare(self, needs_gradients: bool) -> _Call:
        """Binds weights and adapters as they are now."""
        self._weights.refresh()
        native, adapter = self._adapters.bind(self._weights)
        trained = adapter if adapter is not None else self._weights.parts
        self._call = call = _Call(native, trained, [], self._fp32_sums, self._process_group)
        if not needs_gradients:
            return call
        call.parameters = [part.parameter for part in trained if part.parameter.requires_grad]
        if not call.parameters:
            raise UserError(
                "TreeEngine: no parameter of the model requires a gradient, so there is nothing to train; "
                "set requires_grad, enable an adapter, or call the engine under torch.no_grad()"
            )
        if adapter is not None and any(part.parameter.requires_grad for part in self._weights.parts):
            raise UserError(
                "TreeEngine: the model has an active adapter and base weights that require gradients; "
                "expected one of the two: freeze the base weights (PEFT does), or merge or disable the "
                "adapter"
            )
        return call

    def _make_batch(self, call: _Call, flat: Flat, temperature: float, separate: bool) -> Any:
        if not (isinstance(temperature, (int, float)) and temperature > 0):
            raise UserError(f"temperature: got {temperature!r}, expected a number above 0")
        native = call.native
        batch = raises_user_errors(native.make_batch)(
            flat.tokens, flat.lengths, flat.trained, float(temperature)
        )
        plan = raises_user_errors(native.plan)(
            batch, self._strategy, self._max_tokens, self._memory, separate
        )
        self._plan = {**json.loads(plan), "copied_weight_bytes": self._weights.copied_bytes}
        return batch


@dataclass
class _Call:
    """What one call computes with: the engine with the active adapters, the parts of its trained parameters,
    and the parameters that get gradients (none: forward only)."""

    native: Any
    trained: list[Part]
    parameters: list[torch.nn.Parameter]
    fp32_sums: bool = False
    process_group: Any = None

    def gradients(self) -> Iterator[Tensor | None]:
        """The gradient of each of `parameters`, in its dtype. With fp32_sums: None, and main_grad has it."""
        whole = self.native.gradients()
        if self.process_group is not None:
            for gradient in whole:
                torch.distributed.all_reduce(gradient, group=self.process_group)
                gradient.div_(self.process_group.size())
        for part in self.trained:
            parameter = part.parameter
            if not parameter.requires_grad:
                continue
            gradient = whole[part.index][part.begin : part.end]
            if not self.fp32_sums:
                yield gradient.to(parameter.dtype)
                continue
            total = getattr(parameter, "main_grad", None)
            parameter.main_grad = gradient if total is None else total.add_(gradient)
            yield None


class _Values(torch.autograd.Function):
    """Values of the trained tokens as functions of the parameters. Subclasses say which."""

    @staticmethod
    def save(ctx: Any, weights: Weights, call: _Call, batch: Any) -> None:
        ctx.weights, ctx.call, ctx.batch = weights, call, batch
        ctx.versions = [p._version for p in call.parameters]

    @staticmethod
    def take_batch(ctx: Any) -> Any:
        """The batch, for the one backward. Raises UserError if gradients would be wrong."""
        batch, ctx.batch = ctx.batch, None
        if batch is None:
            raise UserError(
                "TreeEngine: a second backward through the same values; their activations are freed after "
                "the first. Call the engine again, or add the losses and call backward once"
            )
        if [p._version for p in ctx.call.parameters] != ctx.versions:
            raise UserError(
                "TreeEngine: a parameter was changed in place between forward and backward (by an "
                "optimizer step?), so the gradients would be wrong; call backward before the change"
            )
        ctx.weights.check_unmoved()
        return batch


class _LogProbs(_Values):
    @staticmethod
    def forward(
        ctx: Any, weights: Weights, call: _Call, batch: Any, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropies = raises_user_errors(call.native.forward)(batch, True)
        _Values.save(ctx, weights, call, batch)
        return log_probs.to(weights.device), entropies.to(weights.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_log_probs: Tensor, d_entropies: Tensor) -> tuple[Tensor | None, ...]:
        batch, dtype = _Values.take_batch(ctx), ctx.weights.accumulator
        seeds = (d_log_probs.to("cpu", dtype), d_entropies.to("cpu", dtype))
        raises_user_errors(ctx.call.native.backward)(batch, *seeds)
        return (None, None, None, *ctx.call.gradients())


class _HiddenStates(_Values):
    @staticmethod
    def forward(ctx: Any, weights: Weights, call: _Call, batch: Any, *parameters: Tensor) -> Tensor:
        hidden = raises_user_errors(call.native.hidden)(batch, True)
        _Values.save(ctx, weights, call, batch)
        return hidden

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:
        batch = _Values.take_batch(ctx)
        raises_user_errors(ctx.call.native.hidden_backward)(batch, d_hidden.to(ctx.weights.accumulator))
        return (None, None, None, *ctx.call.gradients())


class _LossCall:
    """A Python loss function as a C function without arguments."""

    def __init__(self, native: Any, loss_fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self._native, self._loss_fn = native, loss_fn
        self.error: BaseException | None = None
        self.has_graph = False
        self._callback = _CALLBACK(self._run)  # must live as long as its address is used
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value

    def _run(self) -> int:
        try:
            log_probs, entropies, rows = self._native.rows()
            loss = self._loss_fn(log_probs, entropies, rows)
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise UserError(f"loss_fn: got {got}, expected a scalar tensor")
            self.has_graph |= loss.requires_grad
            self._native.set_loss(loss)
        except BaseException as error:  # raised again by step(), outside of the library
            self.error = error
            return 1
        return 0
