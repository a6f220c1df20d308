"""Random rollout files, and their losses and gradients by transformers. The parity tests of `bough step`
share these functions."""

import importlib
import inspect
import json
import random
from pathlib import Path
from typing import Any

import torch
from tiny_models import MODEL_TYPES


def random_rollouts(
    seed: int, vocab: int, max_sequences: int = 7, longest_piece: int = 16
) -> list[dict[str, Any]]:
    """Sequences that fork earlier ones at random positions. Some are empty, equal, or prefixes of others.
    Some have losses on shared tokens, tokens without loss, or no trained token. Advantages are given by
    sequence or by token."""
    draw = random.Random(seed)
    rollouts: list[dict[str, Any]] = []
    for index in range(draw.randint(2, max_sequences)):
        ids: list[int] = []
        if rollouts and draw.random() < 0.85:
            base = draw.choice(rollouts)["input_ids"]
            ids = base[: draw.randint(0, len(base))]
        extra = draw.choice([0, 1, draw.randint(1, longest_piece)])
        ids = ids + [draw.randrange(vocab) for _ in range(extra)]
        mask = [int(draw.random() < 0.6) for _ in ids] if draw.random() < 0.9 else [0] * len(ids)
        if index == 0:
            # If no token is predicted from two tokens or more, gradients of q and k are only rounding errors.
            ids = [draw.randrange(vocab) for _ in range(draw.randint(4, longest_piece))]
            mask = [1] * len(ids)
        advantage = [draw.gauss(0, 1) for _ in ids] if ids and draw.random() < 0.5 else draw.gauss(0, 1)
        rollouts.append(
            {
                "group": str(index % 2),
                "input_ids": ids,
                "loss_mask": mask,
                "logprobs": [-6 * draw.random() * m for m in mask],
                "advantage": advantage,
            }
        )
    return rollouts


def write_rollouts(path: Path, rollouts: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    return path


def log_probs(model, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log p(ids[1:]), as transformers computes it for the sequence alone."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0] / temperature
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


def flat_gradients(
    model, rollouts: list[dict[str, Any]], loss: str, prepare=None
) -> tuple[float, dict, dict]:
    """Returns the loss, the gradients by the names of save_pretrained, and the sum of gradient norms over
    sequences by name. The sums are for the tolerance. Each sequence runs alone through transformers, under
    torch's autograd. `prepare` is called with each rollout before its sequence runs."""
    count = sum(sum(r["loss_mask"][1:]) for r in rollouts)
    total = 0.0
    gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    norms = dict.fromkeys(gradients, 0.0)
    for rollout in rollouts:
        if not any(rollout["loss_mask"][1:]):
            continue
        if prepare is not None:
            prepare(rollout)
        mask = torch.tensor(rollout["loss_mask"][1:], dtype=torch.bool)
        current = log_probs(model, rollout["input_ids"])[mask]
        # The file's numbers are rounded to fp32, the dtype of a rollout.
        advantage = torch.tensor(rollout["advantage"], dtype=torch.float32).to(current.dtype)
        advantage = advantage[1:][mask] if advantage.dim() else advantage.expand(len(current))
        if loss == "pg":
            per_token = -advantage * current
        else:
            behaviour = torch.tensor(rollout["logprobs"][1:], dtype=torch.float32).to(current.dtype)[mask]
            ratio = (current - behaviour).exp()
            per_token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        value = per_token.sum() / count
        model.zero_grad()
        value.backward()
        total += value.item()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] += parameter.grad
                norms[name] += parameter.grad.norm().item()
    return total, split_experts(model, gradients), split_experts(model, norms)


def router_losses(model, rollouts: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The load-balancing loss of transformers and the z-loss over all sequences, with their graphs. Tokens
    after the last trained one of their sequence are masked, and so are sequences without a trained token."""
    name = type(model).__module__
    module = importlib.import_module(name)
    # The function casts to fp32, also in an fp64 model.
    source = inspect.getsource(module.load_balancing_loss_func)
    scope = dict(vars(module))
    exec(source.replace("float32", "float64").replace(".float()", ".double()"), scope)
    logits: list[list[torch.Tensor]] = []
    masks = []
    for rollout in rollouts:
        ids, trained = rollout["input_ids"], rollout["loss_mask"][1:]
        if not ids:
            continue
        output = model.model(torch.tensor([ids]), use_cache=False, output_router_logits=True)
        logits.append(list(output.router_logits))
        last = max((i + 1 for i, flag in enumerate(trained) if flag), default=-1)
        masks += [float(i <= last) for i in range(len(ids))]
    by_layer = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    mask = torch.tensor([masks], dtype=torch.float64)
    config = model.config
    aux = scope["load_balancing_loss_func"](by_layer, config.num_experts, config.num_experts_per_tok, mask)
    squares = torch.stack([layer.logsumexp(-1).square() for layer in by_layer])
    return aux, (squares * mask).sum() / (len(by_layer) * mask.sum())


def split_experts(model, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors or numbers by the parameters' names, under the names of save_pretrained. transformers' modules
    hold all experts in one tensor. Its files and Bough have one tensor for each expert and projection. A
    number, such as a norm, is repeated."""
    is_mixtral = model.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    split: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if is_mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        block, is_expert, kind = name.partition(".experts.")
        if not is_expert:
            split[name] = tensor
            continue
        for expert in range(model.config.num_experts):
            of_expert = tensor[expert] if isinstance(tensor, torch.Tensor) else tensor
            parts: dict[str, Any] = {down: of_expert}
            if kind == "gate_up_proj":
                pieces = of_expert.chunk(2) if isinstance(of_expert, torch.Tensor) else (of_expert,) * 2
                parts = dict(zip((gate, up), pieces, strict=True))
            for projection, part in parts.items():
                split[f"{block}.experts.{expert}.{projection}.weight"] = part
    return split


def gradient_error(got: torch.Tensor, expected: torch.Tensor, norm_sum: float) -> float:
    """||g - ref|| / max(||ref||, 1e-6 x sum over sequences of ||ref_seq||). The error is absolute if nothing
    trains."""
    scale = max(expected.norm().item(), 1e-6 * norm_sum)
    return (got - expected).norm().item() / (scale or 1.0)


def compute_in_double(monkeypatch) -> None:
    """Replaces transformers' formulas by the same formulas without casts to fp32. transformers casts RMSNorm,
    rotary angles and Gemma's embedding scale to fp32 even in an fp64 model, an error of 3e-7 in gradients."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def gemma_norm(self, x):
        return self._norm(x) * (1 + self.weight)

    def gemma_embedding(self, ids):
        return torch.nn.functional.embedding(ids, self.weight) * self.scalar_embed_scale

    def router(self, x):
        logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
        weights, experts = logits.softmax(-1).topk(self.top_k, dim=-1)
        if getattr(self, "norm_topk_prob", True):  # Mixtral's class always does
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts

    def rotary(self, x, position_ids, layer_type=None):
        parameters = self.config.rope_parameters
        arguments = {} if layer_type is None else {"layer_type": layer_type}
        kind = (parameters if layer_type is None else parameters[layer_type])["rope_type"]
        function = ROPE_INIT_FUNCTIONS.get(kind, self.compute_default_rope_parameters)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "float", torch.float64)
            patch.setattr(torch, "float32", torch.float64)
            frequency, scale = function(self.config, **arguments)
        angles = position_ids[..., None].double() * frequency
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * scale, angles.sin() * scale

    for model_type in MODEL_TYPES:
        name = model_type.removesuffix("_text")
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        is_gemma = name.startswith("gemma")
        forwards = {"RMSNorm": gemma_norm if is_gemma else norm, "RotaryEmbedding": rotary}
        if is_gemma:
            forwards["TextScaledWordEmbedding"] = gemma_embedding
        if any(found.endswith("TopKRouter") for found in vars(module)):
            forwards["TopKRouter"] = router
        for ending, forward in forwards.items():
            [class_name] = [found for found in vars(module) if found.endswith(ending)]
            monkeypatch.setattr(getattr(module, class_name), "forward", forward)
