"""Routing replay (actor.routing_replay R3) against transformers with its routers forced to given experts."""

import random
from functools import partial

import pytest
import torch
from rollout_files import compute_in_double, flat_gradients, gradient_error, random_rollouts, write_rollouts
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES
from transformers import AutoModelForCausalLM

MIXTURES = [name for name, given in ARCHITECTURES.items() if "num_experts_per_tok" in given]


def routers_of(model):
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def add_records(rollouts, num_layers, num_experts, num_chosen):
    """Random experts for each token and layer. Some sequences share the records of their common prefix, other
    sequences have records of their own. Some have a row for the last token, which no other token depends
    on."""
    for number, rollout in enumerate(rollouts):
        ids, draw = rollout["input_ids"], random.Random(number)
        variant = draw.choice([0, 0, number])
        rows = []
        for position in range(max(0, len(ids) - draw.randint(0, 1))):
            of_token = random.Random(repr((variant, ids[: position + 1])))
            rows.append([of_token.sample(range(num_experts), num_chosen) for _ in range(num_layers)])
        rollout["routed_experts"] = rows


def forced_router(router, x):
    logits_TE = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), router.weight)
    weights_TK = logits_TE.softmax(-1).gather(1, router.forced_TK)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's class always does
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return logits_TE, weights_TK, router.forced_TK


def force(routers, rollout):
    rows = list(rollout["routed_experts"])
    rows += [rows[0]] * (len(rollout["input_ids"]) - len(rows))  # the last token: no other token sees it
    for layer, router in enumerate(routers):
        router.forced_TK = torch.tensor([row[layer] for row in rows])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("architecture", MIXTURES)
def test_replayed_experts_give_the_gradients_of_a_forced_router(
    bough, tiny_models, tmp_path, monkeypatch, architecture, seed
):
    compute_in_double(monkeypatch)
    directory = tiny_models(architecture)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="sdpa")
    routers = routers_of(model)
    for router in routers:
        router.forward = partial(forced_router, router)
    rollouts = random_rollouts(seed, model.config.vocab_size)
    add_records(rollouts, len(routers), routers[0].num_experts, routers[0].top_k)
    loss = ("pg", "grpo")[seed % 2]
    expected_loss, expected, norms = flat_gradients(model, rollouts, loss, partial(force, routers))
    assert all(expected[name].norm() > 0 for name in expected if ".gate.weight" in name)
    path = write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    for mode, max_tokens, again in (("dense", 1024, "false"), ("path", 5, "true"), ("blocks", 7, "null")):
        result = bough(
            *("step", "--model", directory, "--rollouts", path, "--json", "--threads", 1, "--dtype", "fp64"),
            *("--mode", mode, "--max-tokens-per-mb", max_tokens, "--loss", loss, "actor.routing_replay=R3"),
            *(f"actor.gradient_checkpointing={again}", "--grads", tmp_path / "grads.safetensors"),
            ok=True,
        ).json
        assert result["loss"] == pytest.approx(expected_loss, rel=1e-9, abs=1e-12)
        got = load_file(tmp_path / "grads.safetensors")
        assert got.keys() == expected.keys()
        for name, gradient in got.items():
            error = gradient_error(gradient, expected[name], norms[name])
            assert error <= 1e-9, (mode, name, error)
