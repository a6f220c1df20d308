"""A critic's values, advantages, returns, loss and every gradient against a plain implementation. The plain
implementation uses transformers' hidden states of each sequence alone, a linear layer, GAE by its recursion,
and torch's autograd."""

import json
import random
import subprocess

import pytest
import torch
from rollout_files import compute_in_double, gradient_error, random_rollouts, write_rollouts
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES
from transformers import AutoModelForCausalLM

EPS_CLIP = 0.5


def scored_rollouts(seed, vocab):
    """Rollouts with rewards instead of advantages. Some are truncated at the length limit. Some have turns
    with rewards of their own. One group has a single sample, the others have more."""
    draw = random.Random(seed)
    rollouts = random_rollouts(seed, vocab, max_sequences=9)
    for index, rollout in enumerate(rollouts):
        del rollout["advantage"]
        rollout |= {
            "group": "alone" if index == 0 else str(index % 2),
            "reward": draw.choice([0.0, 1.0, 0.3]),
        }
        rollout["finish_reason"] = draw.choice(["stop", "length"])
        if draw.random() < 0.5:
            turn = 0
            rollout["turns"] = []
            for _ in rollout["input_ids"]:
                rollout["turns"].append(draw.choice([turn, -1]))
                turn += draw.random() < 0.3
            rollout["turn_rewards"] = [draw.gauss(0, 1) for _ in range(turn + 1)]
    return rollouts


def trained(rollout):
    return [i for i, m in enumerate(rollout["loss_mask"]) if m and i > 0]


def token_rewards(rollout):
    """Returns one reward for each trained token. A turn's reward is on the turn's last trained token. The
    rest of the sample's reward is on the last trained token."""
    rewards = dict.fromkeys(trained(rollout), 0.0)
    for turn, reward in enumerate(rollout.get("turn_rewards", [])):
        of_turn = [i for i in rewards if rollout["turns"][i] == turn]
        if of_turn:
            rewards[of_turn[-1]] += reward
    if rewards:
        rewards[list(rewards)[-1]] += rollout["reward"] - sum(rewards.values())
    return rewards


def turns_of(rollout, by_turn):
    """Lists of trained positions, one list for each GAE time step (a token or a turn)."""
    steps = []
    for i in trained(rollout):
        turn = rollout["turns"][i] if "turns" in rollout else 0
        if by_turn and steps and steps[-1][0] == turn:
            steps[-1][1].append(i)
        else:
            steps.append((turn, [i]))
    return [step for _, step in steps]


def gae(rollout, values, actor):
    """Returns the advantages and the returns by position."""
    gamma, lam = actor.get("discount", 1.0), actor.get("gae_lambda", 1.0)
    rewards, steps = token_rewards(rollout), turns_of(rollout, actor.get("gae_timestep_unit") == "turn")
    cut = rollout["finish_reason"] == "length" and actor.get("bootstrap_truncated", False)
    following = values[steps[-1][-1]] if steps and cut else 0.0
    advantage, advantages, returns = 0.0, {}, {}
    for step in reversed(steps):
        value = values[step[0]]
        delta = sum(rewards[i] for i in step) + gamma * following - value
        advantage = delta + gamma * lam * advantage
        following = value
        for i in step:
            advantages[i], returns[i] = advantage, advantage + value
    return advantages, returns


def whitened(advantages):
    """Whitens lists of lists over all of their entries."""
    flat = torch.tensor([a for own in advantages for a in own], dtype=torch.float64)
    if len(flat) < 2:
        return [[0.0 for _ in own] for own in advantages]
    mean, scale = flat.mean().item(), (flat.var() + 1e-8).sqrt().item()
    return [[(a - mean) / scale for a in own] for own in advantages]


def values_of(model, head, rollout):
    """Returns values by the position of each trained token, computed from the hidden state before the
    token."""
    positions = trained(rollout)
    if not positions:
        return {}
    hidden = model.model(torch.tensor([rollout["input_ids"]]), use_cache=False).last_hidden_state[0]
    weight, bias = head[:-1], head[-1]
    return {i: hidden[i - 1] @ weight + bias for i in positions}


def plain_critic(model, rollouts, head, new_head, actor):
    with torch.no_grad():
        old = [{i: v.item() for i, v in values_of(model, head, r).items()} for r in rollouts]
    estimates = [gae(r, values, actor) for r, values in zip(rollouts, old, strict=True)]
    count = sum(len(values) for values in old)
    new_head = new_head.clone().requires_grad_(True)
    gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    norms = dict.fromkeys(gradients, 0.0)
    total, cut = 0.0, 0
    for rollout, before, (_, returns) in zip(rollouts, old, estimates, strict=True):
        losses = []
        for i, value in values_of(model, new_head, rollout).items():
            clipped = torch.clamp(value, before[i] - EPS_CLIP, before[i] + EPS_CLIP)
            plain, other = (value - returns[i]) ** 2, (clipped - returns[i]) ** 2
            losses.append(torch.maximum(plain, other) / 2 / count)
            cut += (other > plain).item()
        if not losses:
            continue
        loss = sum(losses)
        total += loss.item()
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] += parameter.grad
                norms[name] += parameter.grad.norm().item()
    gradients["score.weight"], gradients["score.bias"] = new_head.grad[None, :-1], new_head.grad[-1:]
    norms |= {"score.weight": 0.0, "score.bias": 0.0}
    in_order = [[own[i] for i in sorted(own)] for own in old]
    advantages = [[own[i] for i in sorted(own)] for own, _ in estimates]
    return {
        "values": in_order,
        "returns": [[own[i] for i in sorted(own)] for _, own in estimates],
        "advantages": whitened(advantages) if "adv_norm" not in actor else advantages,
        "loss": total,
        "clip_fraction": cut / count,
    }, (gradients, norms)


def heads_of(seed, width, dtype):
    draw = torch.Generator().manual_seed(seed)
    head, step = (torch.randn(width + 1, generator=draw, dtype=torch.float64) / 6 for _ in range(2))
    return head.to(dtype), (head + 0.3 * step).to(dtype)


def run_tool(build_dir, folder, model, rollouts, settings):
    path, out = write_rollouts(folder / "rollouts.jsonl", rollouts), folder / "gradients.safetensors"
    program = build_dir / "bin" / "critic_tool"
    done = subprocess.run(
        [program, model, path, json.dumps(settings), out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), load_file(out)


ACTORS = [
    {"adv_estimator": "gae", "gae_lambda": 0.9, "discount": 0.95},
    {
        "adv_estimator": "gae",
        "gae_timestep_unit": "turn",
        "gae_lambda": 0.5,
        "discount": 0.9,
        "bootstrap_truncated": True,
    },
    {"adv_estimator": "gae", "adv_norm": {"mean_level": "none", "std_level": "none"}},
    {"adv_estimator": "gae", "bootstrap_truncated": True, "discount": 0.9},
]


def flat(lists):
    return [x for own in lists for x in own]


def compare(got, expected, tolerance):
    for name in ("values", "returns"):
        assert [len(own) for own in got[name]] == [len(own) for own in expected[name]], name
        assert flat(got[name]) == pytest.approx(flat(expected[name]), abs=tolerance, rel=tolerance), name
    # A trajectory stores its advantages in fp32.
    near = max(tolerance, 1e-6)
    assert flat(got["advantages"]) == pytest.approx(flat(expected["advantages"]), abs=near, rel=near)
    assert got["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert got["clip_fraction"] == pytest.approx(expected["clip_fraction"])


@pytest.mark.parametrize("seed", range(12))
def test_everything_in_fp64(build_dir, tiny_models, tmp_path, monkeypatch, seed):
    compute_in_double(monkeypatch)
    architecture = list(ARCHITECTURES)[seed % len(ARCHITECTURES)]
    directory = tiny_models(architecture)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="sdpa")
    rollouts = scored_rollouts(seed, model.config.vocab_size)
    head, new_head = heads_of(seed, model.config.hidden_size, torch.float64)
    actor = ACTORS[seed % len(ACTORS)]
    expected, (gradients, norms) = plain_critic(model, rollouts, head, new_head, actor)
    for mode, max_tokens in (("dense", 1024), ("path", 1 + seed % 7), ("blocks", 33)):
        limits = {"tree_training_mode": mode, "mb_spec": {"max_tokens_per_mb": max_tokens}}
        settings = {
            "actor": actor | limits,
            "critic": {"eps_clip": EPS_CLIP},
            "dtype": "fp64",
            "head": head.tolist(),
            "new_head": new_head.tolist(),
        }
        got, grads = run_tool(build_dir, tmp_path, directory, rollouts, settings)
        compare(got, expected, 1e-9)
        for name, gradient in grads.items():
            assert gradient_error(gradient, gradients[name], norms[name]) <= 1e-9, (architecture, mode, name)


@pytest.mark.parametrize("seed", range(4))
def test_everything_in_fp32(build_dir, tiny_models, tmp_path, seed):
    directory = tiny_models("qwen3")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    rollouts = scored_rollouts(100 + seed, model.config.vocab_size)
    head, new_head = heads_of(seed, model.config.hidden_size, torch.float32)
    expected, (gradients, norms) = plain_critic(model, rollouts, head, new_head, ACTORS[seed])
    settings = {
        "actor": ACTORS[seed],
        "critic": {"eps_clip": EPS_CLIP},
        "dtype": "fp32",
        "head": head.tolist(),
        "new_head": new_head.tolist(),
    }
    got, grads = run_tool(build_dir, tmp_path, directory, rollouts, settings)
    compare(got, expected, 1e-5)
    for name, gradient in grads.items():
        assert gradient_error(gradient, gradients[name], norms[name]) <= 1e-5, name
