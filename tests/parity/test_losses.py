"""Losses and corrections against implementations written from their equations (loss_reference.py). Values
and gradients agree in fp64 to 1e-10. The gradients of the implementations are compared with central
differences."""

import json
import math
import random

import pytest
import torch
from loss_reference import (
    GIVEN,
    accepted,
    by_sequence,
    gradient,
    random_rows,
    reference,
    request_of,
    run_tool,
)

COVARIANCE = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 1.0, "kl_cov_ratio": 0.15}
LOSSES = {
    "ppo": {},
    "ppo, clip higher (DAPO)": {"loss": "ppo", "eps_clip": 0.2, "eps_clip_higher": 0.28},
    "ppo, dual clip": {"loss": "ppo", "eps_clip": 0.1, "c_clip": 1.3, "use_decoupled_loss": False},
    "ppo, KL and entropy": {"loss": "ppo", "kl_loss_coef": 0.3, "entropy_coef": 0.2},
    "ppo, loglinear": {"loss": "ppo", "prox_logp_method": "loglinear"},
    "ppo against mu": {"loss": "ppo", "use_decoupled_loss": False, "recompute_logprob": False},
    "pg": {"kl_loss_coef": 0.2, "kl_loss_type": "k2"},
    "gspo": {},
    "gspo, wide": {"loss": "gspo", "eps_clip": 0.05, "eps_clip_higher": 0.1},
    "gspo_token": {},
    "gspo_token, wide": {"loss": "gspo_token", "eps_clip": 0.05, "use_decoupled_loss": False},
    "cispo": {},
    "cispo, narrow": {"loss": "cispo", "eps_clip": 0.2, "eps_clip_higher": 0.3},
    "sapo": {},
    "sapo, sharp": {"loss": "sapo", "sapo_tau_pos": 3.0, "sapo_tau_neg": 5.0},
    "gmpo": {},
    "gmpo, narrow": {"loss": "gmpo", "eps_clip": 0.03},
    "dppo_tv": {"dppo_threshold": 0.05},
    "dppo_kl": {"dppo_threshold": 0.01},
    "clip_cov": COVARIANCE,
    "kl_cov": COVARIANCE,
    "ppo, unbiased KL": {"loss": "ppo", "kl_loss_coef": 0.3, "kl_loss_type": "unbiased"},
    "pg, unbiased KL": {"loss": "pg", "kl_loss_coef": 0.3, "kl_loss_type": "unbiased"},
    "ppo, KL top-k": {"loss": "ppo", "kl_loss_coef": 0.3, "kl_loss_type": "topk"},
    "ppo, KL top-k and obrs": {
        "loss": "ppo",
        "correction": "obrs",
        "kl_loss_coef": 2.0,
        "kl_loss_type": "topk",
    },
    "pg, teacher alone": {"loss": "pg", "teacher": {"path": "t", "rl_loss_weight": 0.0}},
    "ppo, teacher": {"loss": "ppo", "teacher": {"path": "t", "distill_loss_weight": 0.3}},
    "gspo, teacher": {"loss": "gspo", "teacher": {"path": "t", "distill_loss_weight": 0.3}},
    "ppo, teacher k2": {"loss": "ppo", "teacher": {"path": "t", "loss_mode": "k2", "rl_loss_weight": 0.5}},
    "pg, teacher k3": {"loss": "pg", "teacher": {"path": "t", "loss_mode": "k3", "distill_loss_weight": 2.0}},
    "ppo, teacher top-k": {"loss": "ppo", "teacher": {"path": "t", "loss_mode": "topk"}},
    "gmpo, teacher top-k": {"loss": "gmpo", "teacher": {"path": "t", "loss_mode": "topk"}},
}
CORRECTIONS = [
    {"correction": "none"},
    {"correction": "cap", "behave_imp_weight_cap": 1.2},
    {"behave_imp_weight_cap": None},
    {"correction": "tis", "correction_upper": 1.1},
    {"correction": "tis", "correction_level": "sequence"},
    {"correction": "tis", "correction_level": "geometric", "correction_upper": 1.01, "correction_lower": 0.9},
    {"correction": "icepop"},
    {"correction": "icepop", "correction_lower": 0.8, "correction_upper": 1.1},
    {"correction": "masked_is"},
    {"correction": "masked_is", "correction_level": "sequence"},
    {"correction": "masked_is", "correction_level": "geometric"},
    {"correction": "masked_is", "correction_veto": 0.9},
    {"correction": "rejection", "correction_lower": 0.95, "correction_upper": 1.05, "correction_veto": 0},
    {"correction": "rejection", "correction_level": "sequence", "correction_veto": 0.8},
    {"correction": "rejection", "correction_level": "geometric", "correction_lower": 0.9},
    {"off_policy_mask_threshold": 0.01},
    {"m2_threshold": 0.02},
    {"m2_threshold": 1e-9},
    {"correction": "tis", "off_policy_mask_threshold": 0.0, "m2_threshold": 0.05},
    {"loss": "pg", "correction": "tis", "correction_upper": 1.05},
    {"loss": "gspo", "correction": "tis", "correction_level": "geometric"},
    *(
        {"rejection_sampling": {"level": level, "metric": metric, "agg": agg, "upper": upper, "lower": lower}}
        for metric, upper, lower in (
            ("ratio", 1.1, 0.9),
            ("kl_k1", 0.1, -0.1),
            ("kl_k2", 0.01, None),
            ("kl_k3", 0.01, None),
        )
        for level, agg in (("token", "mean"), ("sequence", "sum"), ("sequence", "mean"), ("sequence", "max"))
    ),
    {"rejection_sampling": {"action": "clamp", "upper": 1.1, "lower": 0.9}},
    {"rejection_sampling": {"action": "clamp", "level": "sequence", "agg": "sum", "upper": 1.05}},
]
OBRS = [
    {"correction": "obrs"},
    {"correction": "obrs", "correction_upper": 1.2},
    {"correction": "obrs", "obrs_lambda": 0.8},
    {"correction": "obrs", "obrs_normalizer": "scaled", "correction_upper": 1.2},
    {"correction": "obrs", "obrs_normalizer": "none", "obrs_lambda": 0.8, "correction_upper": 1.2},
    {"loss": "gspo", "correction": "obrs", "obrs_lambda": 1.3},
]
CASES = [({"loss": name} | settings) for name, settings in LOSSES.items()]
CASES += [({"loss": "ppo"} | settings) for settings in OBRS]
CASES += [({"loss": "ppo", "eps_clip": 0.3} | settings) for settings in CORRECTIONS]

SEEDS = range(8)


def rows_of(settings, seed):
    """Returns the rows as the trainer makes them, and whether pi_old is the current policy."""
    rows = random_rows(seed) | {"version": 4}
    if not settings.get("use_decoupled_loss", True) and not settings.get("recompute_logprob", True):
        del rows["proximal"]  # the trainer computes it only if the settings ask for it
        return rows, False
    return rows, seed % 4 == 3


@pytest.fixture(scope="module")
def answers(build_dir):
    """The answers for every case: a list over seeds."""
    all_rows = [(settings, *rows_of(settings, seed)) for settings in CASES for seed in SEEDS]
    flat = run_tool(build_dir, [request_of(*each) for each in all_rows])
    return [flat[i : i + len(SEEDS)] for i in range(0, len(flat), len(SEEDS))]


def name_of(settings):
    return json.dumps(settings)[1:-1].replace('"', "") if isinstance(settings, dict) else ""


def reads_top_k(settings):
    """Whether the loss has a gradient in the log-probabilities of the top-k tokens."""
    return "topk" in (settings.get("teacher", {}).get("loss_mode"), settings.get("kl_loss_type"))


@pytest.mark.parametrize(("number", "settings"), list(enumerate(CASES)), ids=name_of)
def test_value_and_gradient_are_those_of_the_equation(answers, number, settings):
    seen = set()
    for seed, answer in zip(SEEDS, answers[number], strict=True):
        assert "error" not in answer, answer
        rows, is_current = rows_of(settings, seed)
        kept = accepted(settings, rows, is_current) if settings.get("correction") == "obrs" else None
        loss, d_log_probs, factors, d_given = gradient(settings, rows, is_current, kept)
        assert answer["loss"] == pytest.approx(loss, abs=1e-10, rel=1e-10)
        assert answer["d_log_probs"] == pytest.approx(d_log_probs, abs=1e-10, rel=1e-10)
        if reads_top_k(settings):
            assert answer["d_given"] == pytest.approx(d_given, abs=1e-10, rel=1e-10)
            assert max(map(abs, d_given)) > 1e-3
        else:
            assert not any(answer["d_given"])
        if kept:
            assert answer["metrics"]["mismatch/obrs_accepted"] == pytest.approx(sum(kept) / len(kept))
            assert answer["metrics"]["mismatch/masked_fraction"] == pytest.approx(1 - sum(kept) / len(kept))
        if "mismatch/masked_fraction" in answer["metrics"]:
            masked = sum(f == 0 for f in factors) / len(factors)
            assert answer["metrics"]["mismatch/masked_fraction"] == pytest.approx(masked, abs=1e-12)
            assert answer["metrics"]["mismatch/factor_mean"] == pytest.approx(sum(factors) / len(factors))
            assert answer["metrics"]["mismatch/factor_max"] == pytest.approx(max(factors))
            seen.update(f == 0 for f in factors)
    if settings.get("correction") in ("icepop", "rejection") or "m2_threshold" in settings:
        assert True in seen, "the settings of this case mask nothing"


@pytest.mark.parametrize("settings", CASES, ids=name_of)
def test_gradients_are_central_differences(settings):
    """For the implementations here: the gradient stops where the equations say so and nowhere else."""
    rows, _ = rows_of(settings, 5)
    kept = accepted(settings, rows, False) if settings.get("correction") == "obrs" else None
    _, d_log_probs, _, d_given = gradient(settings, rows, False, kept)
    frozen = [torch.tensor(x, dtype=torch.float64) for x in rows["log_probs"]]
    given = [[torch.tensor(x, dtype=torch.float64) for x in own] for own in rows["given"]]
    h = 1e-6
    for i in range(len(frozen)):
        at = [
            reference(
                settings,
                rows,
                [x + (j == i) * step for j, x in enumerate(frozen)],
                frozen,
                False,
                given,
                kept,
            )[0]
            for step in (h, -h)
        ]
        assert ((at[0] - at[1]) / (2 * h)).item() == pytest.approx(d_log_probs[i], abs=1e-7), i
    for i in range(len(given)) if reads_top_k(settings) else ():
        at = []
        for step in (h, -h):
            moved = [list(own) for own in given]
            moved[i][1] = moved[i][1] + step
            at.append(reference(settings, rows, frozen, frozen, False, moved, kept)[0])
        assert ((at[0] - at[1]) / (2 * h)).item() == pytest.approx(d_given[4 * i + 1], abs=1e-7), i


EXTREMES = [-1000.0, -200.0, -14.0, -1e-12, None]


def test_extreme_ratios_are_finite(build_dir):
    """Ratios of 0, of 1e6 and beyond, log-probabilities of minus infinity (null), and equal rewards."""
    rows = {name: [] for name in ("log_probs", "advantages", "behaviour", "proximal")}
    for advantage in (-1.0, 0.0, 1.0):
        for log_pi in (-300.0, -14.0, -1e-12):
            for other in EXTREMES:
                rows["log_probs"].append(log_pi)
                rows["advantages"].append(advantage)
                rows["behaviour"].append(other)
                rows["proximal"].append(EXTREMES[len(rows["proximal"]) % 5])
    count = len(rows["log_probs"])
    rows["teacher"] = rows["behaviour"]
    for shift, name in enumerate(GIVEN):  # null: a token of probability 0
        rows[name] = [[(-1.0, -300.0, None)[(i + shift) % 3], -0.7, None] for i in range(count)]
    rows["reference_given"] = rows["teacher_given"][1:] + rows["teacher_given"][:1]
    rows |= {"entropies": [0.0] * count, "reference": [-1.0] * count, "weights": [1.0] * count}
    rows |= {
        "sequences": [i // 4 for i in range(count)],
        "versions": [i % 5 for i in range(count)],
        "version": 4,
    }
    one = {name: values[:1] if isinstance(values, list) else values for name, values in rows.items()}
    none = {name: [] if isinstance(values, list) else values for name, values in rows.items()}
    requests = [request_of(settings, which, False) for settings in CASES for which in (rows, one, none)]
    for request, answer in zip(requests, run_tool(build_dir, requests), strict=True):
        assert "error" not in answer, (answer, request["actor"])
        values = [answer["loss"], *answer["d_log_probs"], *answer["metrics"].values()]
        assert all(x is not None and math.isfinite(x) for x in values), (answer, request["actor"])


# Settings; the level that they judge (token or sequence); log w of the perturbed tokens; whether the
# perturbed tokens are masked or truncated.
SEQUENCE = {"correction_level": "sequence"}
PERTURBED = {
    "cap": ({"correction": "cap", "behave_imp_weight_cap": 2.0}, "token", 1.5, "masked"),
    "tis": ({"correction": "tis"}, "token", 1.5, "truncated"),
    "tis, product": ({"correction": "tis", "correction_level": "sequence"}, "sequence", 1.5, "truncated"),
    "icepop, above": ({"correction": "icepop"}, "token", 1.7, "masked"),
    "icepop, below": ({"correction": "icepop"}, "token", -1.0, "masked"),
    "masked_is": ({"correction": "masked_is"}, "token", 1.0, "masked"),
    "masked_is, product": ({"correction": "masked_is"} | SEQUENCE, "sequence", 1.0, "masked"),
    "masked_is, geometric": (
        {"correction": "masked_is", "correction_level": "geometric"}
        | {"correction_lower": 0.99, "correction_upper": 1.01},
        "sequence",
        1.0,
        "masked",
    ),
    "veto": ({"correction": "masked_is"}, "sequence", -9.5, "masked"),
    "rejection": ({"correction": "rejection"}, "token", -1.0, "masked"),
    "rejection, product": ({"correction": "rejection"} | SEQUENCE, "sequence", -1.0, "masked"),
    "clamp": ({"rejection_sampling": {"action": "clamp", "upper": 2.0}}, "token", 1.5, "truncated"),
    "mean of k2": (
        {"rejection_sampling": {"level": "sequence", "metric": "kl_k2", "upper": 0.01}},
        "sequence",
        1.0,
        "masked",
    ),
    "off-policy mask": (
        {"correction": "tis", "correction_upper": 1e6, "off_policy_mask_threshold": 0.05},
        "sequence",
        -1.0,
        "masked",
    ),
    "M2PO": ({"correction": "tis", "correction_upper": 1e6, "m2_threshold": 1e-4}, "token", 1.0, "masked"),
}


@pytest.mark.parametrize("name", PERTURBED)
def test_perturbed_log_probabilities_are_counted_exactly(build_dir, name):
    """In each of 37 of 100 sequences, one token's sampling probability differs from pi_old's. Exactly these
    tokens, or all tokens of these sequences, are masked or truncated."""
    settings, level, shift, what = PERTURBED[name]
    draw, sequences, length, perturbed = random.Random(7), 100, 10, 37
    chosen = {s * length + draw.randrange(length) for s in draw.sample(range(sequences), perturbed)}
    count = sequences * length
    rows = {
        "log_probs": [-2.0] * count,
        "proximal": [-2.0] * count,
        "behaviour": [-2.0 + 1e-3 - (shift if i in chosen else 0.0) for i in range(count)],
        "advantages": [-1.0] * count,
        "entropies": [0.0] * count,
        "weights": [1 / count] * count,
        "sequences": [i // length for i in range(count)],
        "version": 0,
    }
    [answer] = run_tool(build_dir, [request_of({"loss": "pg"} | settings, rows, False)])
    assert "error" not in answer, answer
    metrics = answer["metrics"]
    hit = {s * length + t for s in {i // length for i in chosen} for t in range(length)}
    hit = chosen if level == "token" else hit
    assert metrics[f"mismatch/{what}_fraction"] == pytest.approx(len(hit) / count, abs=1e-12)
    if what == "truncated":
        assert metrics["mismatch/masked_fraction"] == 0
    else:
        assert metrics.get("mismatch/truncated_fraction", 0) == 0
        assert {i for i, d in enumerate(answer["d_log_probs"]) if d == 0} == hit
        if "mismatch/sequences_dropped" in metrics:
            dropped = perturbed / sequences if level == "sequence" else 0.0
            assert metrics["mismatch/sequences_dropped"] == pytest.approx(dropped)
    others = [d for i, d in enumerate(answer["d_log_probs"]) if i not in hit]
    assert min(others) == pytest.approx(max(others)), "what was not perturbed has one factor"


def test_kl_to_go_and_controllers(build_dir):
    draw = random.Random(5)
    kl = [draw.gauss(0, 1) for _ in range(12)]
    sequences = [0, 0, 0, 1, 2, 2, 2, 2, 2, 4, 4, 4]
    [answer] = run_tool(build_dir, [{"kl_to_go": kl, "sequences": sequences}])
    expected = [
        sum(x for j, x in enumerate(kl) if j >= i and sequences[j] == sequences[i]) for i in range(12)
    ]
    assert answer["kl_to_go"] == pytest.approx(expected, abs=1e-12)
    members = by_sequence({"sequences": sequences})
    means = [sum(kl[i] for i in own) / len(own) for own in members]
    assert answer["mean"] == pytest.approx(sum(means) / len(means), abs=1e-12)

    steps = [{"kl": draw.random() * 0.3, "sequences": 64, "entropy": draw.random() * 0.4} for _ in range(30)]
    steps.append({"kl": 0.5, "sequences": 0, "entropy": 0.2})
    settings = {
        "kl_ctl": 0.1,
        "kl_ctrl": {"type": "adaptive", "target_kl": 0.1, "horizon": 500},
        "target_entropy": 0.2,
        "entropy_coef": 0.01,
    }
    [answer] = run_tool(build_dir, [{"actor": json.dumps(settings), "kl": steps}])
    kl_ctl, coefficient = 0.1, 0.01
    for step, got_kl, got_entropy in zip(steps, answer["kl_ctl"], answer["entropy_coef"], strict=True):
        error = max(-0.2, min(0.2, step["kl"] / 0.1 - 1))
        kl_ctl *= 1 + error * step["sequences"] / 500
        is_on = step["entropy"] <= 0.2
        coefficient = max(0.0, coefficient + (0.005 if is_on else -0.005))
        assert got_kl == pytest.approx(kl_ctl, rel=1e-12)
        assert got_entropy == pytest.approx(coefficient if is_on else 0.0, abs=1e-15)
    errors = run_tool(
        build_dir,
        [
            {"actor": json.dumps(wrong), "kl": []}
            for wrong in (
                {"kl_ctrl": {"type": "adaptive"}},
                {"ref_model_sync_steps": 3},
                {"correction": "obrs", "correction_lower": 0.5},
                {"correction": "obrs", "correction_upper": 0.9},
                {"correction": "obrs", "obrs_lambda": 4.0, "obrs_normalizer": "scaled"},
                {"correction": "obrs", "obrs_lambda": 4.0, "obrs_normalizer": "none"},
                {"correction": "obrs", "obrs_normalizer": "all"},
                {"correction": "obrs", "prox_logp_method": "loglinear"},
                {"correction": "obrs", "teacher": {"path": "t", "loss_mode": "topk"}},
                {
                    "kl_loss_coef": 0.1,
                    "kl_loss_type": "topk",
                    "teacher": {"path": "t", "loss_mode": "topk"},
                },
            )
        ],
    )
    wanted = [
        "kl_ctrl.type",
        "ref_model_sync_steps",
        "correction_lower",
        "correction_upper",
        "correction_upper",
        "correction_upper",
        "obrs_normalizer",
        "prox_logp_method",
        "teacher.loss_mode",
        "teacher.loss_mode",
    ]
    assert all(name in e["error"] for name, e in zip(wanted, errors, strict=True)), errors
