"""Advantages against implementations written from their equations (docs/algorithms.md)."""

import json
import math
import random

import pytest
from loss_reference import run_tool


def random_groups(seed):
    """Groups of 1 to 6 samples in any order. Some groups have equal rewards. Some samples train no token."""
    draw = random.Random(1000 + seed)
    batch = {"rewards": [], "groups": [], "tokens": [], "parts": []}
    for group in range(draw.randint(2, 6)):
        equal = draw.random() < 0.25
        for _ in range(draw.choice([1, 2, 3, 6]) if seed % 3 else draw.randint(2, 6)):
            parts = [0.5, 0.25] if equal else [draw.choice([0.0, 1.0]), draw.random()]
            batch["parts"].append(parts)
            batch["rewards"].append(sum(parts))
            batch["groups"].append(group * 7)
            batch["tokens"].append(draw.choice([0, 1, 3, 8]))
    greedy = {group: draw.choice([0.0, 1.0, draw.gauss(0, 1)]) for group in sorted(set(batch["groups"]))}
    batch["baselines"] = [greedy[group] for group in batch["groups"]]
    order = list(range(len(batch["rewards"])))
    draw.shuffle(order)
    return {name: [values[i] for i in order] for name, values in batch.items()}


def mean_and_deviation(values, unbiased=True):
    mean = sum(values) / len(values)
    if len(values) < 2 or min(values) == max(values):
        return mean, 0.0
    return mean, math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - unbiased))


def whitened(advantages, tokens):
    flat = [x for own, n in zip(advantages, tokens, strict=True) for x in (own if len(own) != 1 else own * n)]
    if len(flat) < 2 or min(flat) == max(flat):
        return [[0.0] * len(own) for own in advantages]
    mean, deviation = mean_and_deviation(flat)
    return [[(x - mean) / math.sqrt(deviation**2 + 1e-8) for x in own] for own in advantages]


def expected_advantages(settings, batch):
    """Returns a list by sequence. Each entry has one number, or one number for each trained token."""
    name, rewards, tokens = settings["adv_estimator"], batch["rewards"], batch["tokens"]
    eps, unbiased = settings.get("eps", 1e-6), settings.get("std_unbiased", True)
    mates = [[j for j, g in enumerate(batch["groups"]) if g == own] for own in batch["groups"]]

    def normalized(values, i):
        own = [values[j] for j in mates[i]]
        mean, deviation = mean_and_deviation(own, unbiased)
        if len(own) == 1:
            return own[0] / (1 + eps)
        return 0.0 if deviation == 0 else (values[i] - mean) / (deviation + eps)

    def at_level(level, values, i):
        """Mean and deviation over the group or the batch, or neutral values if the level is neither."""
        return {
            "group": lambda: mean_and_deviation([values[j] for j in mates[i]], unbiased),
            "batch": lambda: mean_and_deviation(values, unbiased),
            "none": lambda: (0.0, None),
        }[level]()

    def plain(i):
        own = [rewards[j] for j in mates[i]]
        mean = sum(own) / len(own)
        if "mean_level" in settings:
            deviation = at_level(settings["std_level"], rewards, i)[1]
            divisor = 1.0 if deviation is None else (deviation or 1.0) + eps
            return (rewards[i] - at_level(settings["mean_level"], rewards, i)[0]) / divisor
        if name == "grpo":
            return normalized(rewards, i)
        if name == "dr_grpo" or name == "reinforce_plus_plus_baseline":
            return rewards[i] - mean
        if name == "rloo":
            return rewards[i] - sum(rewards[j] for j in mates[i] if j != i) / (len(own) - 1)
        if name == "opo":
            total = sum(tokens[j] for j in mates[i])
            weighted = sum(tokens[j] * rewards[j] for j in mates[i])
            return rewards[i] - (weighted / total if len(own) > 1 and total else 0.0)
        if name == "remax":
            return rewards[i] - batch["baselines"][i]
        if name == "maxrl":
            return 0.0 if mean <= eps else (rewards[i] - mean) / (mean + eps)
        if name == "gdpo":
            weights = settings.get("gdpo_weights", [1.0, 1.0])
            return sum(w * normalized([p[k] for p in batch["parts"]], i) for k, w in enumerate(weights))
        raise AssertionError(name)

    if name == "reinforce_plus_plus":
        gamma = settings.get("discount", 1.0)
        if gamma == 1.0:
            return whitened([[r] for r in rewards], tokens)
        return whitened(
            [[gamma ** (n - 1 - t) * r for t in range(n)] for r, n in zip(rewards, tokens, strict=True)],
            tokens,
        )
    out = [[plain(i)] for i in range(len(rewards))]
    return whitened(out, tokens) if name in ("reinforce_plus_plus_baseline", "gdpo") else out


ADVANTAGES = [
    {"adv_estimator": "grpo"},
    {"adv_estimator": "grpo", "std_unbiased": False, "eps": 0.01},
    *(
        {"adv_estimator": "grpo", "eps": 1e-3, "mean_level": mean, "std_level": std}
        for mean in ("group", "batch", "none")
        for std in ("group", "batch", "none")
    ),
    {"adv_estimator": "dr_grpo"},
    {"adv_estimator": "rloo"},
    {"adv_estimator": "reinforce_plus_plus"},
    {"adv_estimator": "reinforce_plus_plus", "discount": 0.9},
    {"adv_estimator": "reinforce_plus_plus_baseline"},
    {"adv_estimator": "opo"},
    {"adv_estimator": "remax"},
    {"adv_estimator": "maxrl"},
    {"adv_estimator": "gdpo"},
    {"adv_estimator": "gdpo", "gdpo_weights": [1.0, 0.25]},
]


def test_advantages_are_those_of_the_equation(build_dir):
    cases = [(settings, random_groups(seed)) for settings in ADVANTAGES for seed in range(20)]
    # RLOO has no baseline for a group of one sample.
    cases = [
        c
        for c in cases
        if c[0]["adv_estimator"] != "rloo" or min(map(c[1]["groups"].count, c[1]["groups"])) > 1
    ]
    answers = run_tool(build_dir, [{"actor": json.dumps(settings)} | batch for settings, batch in cases])
    for (settings, batch), answer in zip(cases, answers, strict=True):
        assert "error" not in answer, answer
        for got, want in zip(answer["advantages"], expected_advantages(settings, batch), strict=True):
            assert got == pytest.approx(want, abs=1e-10), (settings, batch)
    assert len(cases) > 200


def test_advantages_refuse_what_they_cannot_compute(build_dir):
    alone = {"rewards": [1.0], "groups": [0], "tokens": [3], "parts": [[]]}
    errors = [
        answer["error"]
        for answer in run_tool(
            build_dir,
            [
                {"actor": "adv_estimator: rloo"} | alone,
                {"actor": "adv_estimator: gdpo"} | alone,
                {"actor": "{adv_estimator: gdpo, gdpo_weights: [1, 2]}"} | alone | {"parts": [[1.0]]},
            ],
        )
    ]
    assert "n_samples" in errors[0] and "rewards" in errors[1] and "gdpo_weights" in errors[2], errors
