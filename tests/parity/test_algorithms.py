"""Losses, corrections and advantages against implementations written from their equations
(docs/algorithms.md). Values and gradients agree in fp64 to 1e-10. The gradients of the implementations here
are compared with central differences."""

import json
import math
import random
import subprocess

import pytest
import torch

MAX_LOG_RATIO = 20.0


def run_tool(build_dir, requests):
    """Returns the answers to the requests, in one run of the program."""
    text = "".join(json.dumps(request) + "\n" for request in requests)
    program = build_dir / "bin" / "algorithms_tool"
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


GIVEN = ("given", "behaviour_given", "proximal_given", "teacher_given")


def random_rows(seed):
    """Sequences of 1 to 9 tokens, some with an advantage of 0. Ratios lie from far below to far above 1."""
    draw = random.Random(seed)
    rows = {
        name: [] for name in ("log_probs", "entropies", "advantages", "behaviour", "proximal", "reference")
    }
    rows |= {"weights": [], "sequences": [], "versions": [], "teacher": []}
    rows |= {name: [] for name in GIVEN}
    for sequence in range(draw.randint(3, 9)):
        advantage = draw.choice([0.0, draw.gauss(0, 1), draw.gauss(0, 1)])
        spread = draw.choice([0.001, 0.05, 0.4])
        for _ in range(draw.randint(1, 9)):
            log_pi = -abs(draw.gauss(0, 1.5)) - 0.05
            rows["log_probs"].append(log_pi)
            rows["entropies"].append(abs(draw.gauss(0, 1)))
            rows["advantages"].append(advantage)
            rows["proximal"].append(min(log_pi + spread * draw.gauss(0, 1), -1e-3))
            rows["behaviour"].append(min(log_pi + spread * draw.gauss(0, 1), -1e-3))
            rows["reference"].append(log_pi + 0.5 * draw.gauss(0, 1))
            rows["weights"].append(0.01 + abs(draw.gauss(0, 0.1)))
            rows["sequences"].append(sequence)
            rows["versions"].append(draw.randint(0, 5))
            rows["teacher"].append(log_pi + 0.5 * draw.gauss(0, 1))
            for name in GIVEN:  # four tokens of a vocabulary of seven
                logits = [draw.gauss(0, 1.5) for _ in range(7)]
                total = math.log(sum(map(math.exp, logits)))
                rows[name].append([x - total for x in logits[:4]])
    return rows


def by_sequence(rows):
    """Returns a list of row numbers for each sequence."""
    members = {}
    for row, sequence in enumerate(rows["sequences"]):
        members.setdefault(sequence, []).append(row)
    return list(members.values())


def sign(x):
    return (x > 0) - (x < 0)


# Each function returns one number a row. `live` is log pi with a gradient. `frozen` is log pi where the
# equations stop the gradient. log_r is log(pi / pi_old), or log(pi / mu) for DPPO. frozen_r is computed from
# `frozen` in the same way.


def ppo_row(settings, a, log_r, default_low=0.2, default_high=None):
    low = settings.get("eps_clip", default_low)
    high = settings.get("eps_clip_higher", settings.get("eps_clip", default_high or default_low))
    r = torch.exp(log_r)
    clipped = torch.clamp(r, 1 - low, 1 + high)
    value = -torch.minimum(r * a, clipped * a)
    if "c_clip" in settings and a < 0:
        value = torch.minimum(value, torch.tensor(-settings["c_clip"] * a, dtype=torch.float64))
    return value


def policy_terms(settings, rows, live, frozen, log_r, frozen_r):
    loss, advantages = settings["loss"], rows["advantages"]
    count = len(advantages)
    if loss == "ppo":
        return [ppo_row(settings, advantages[i], log_r[i]) for i in range(count)]
    if loss == "pg":
        return [-advantages[i] * live[i] for i in range(count)]
    if loss == "cispo":
        low, high = settings.get("eps_clip", 1.0), settings.get("eps_clip_higher", 4.0)
        return [
            -torch.clamp(torch.exp(frozen_r[i]), 1 - low, 1 + high) * advantages[i] * live[i]
            for i in range(count)
        ]
    if loss == "sapo":
        taus = [
            settings.get("sapo_tau_pos", 1.0) if a > 0 else settings.get("sapo_tau_neg", 1.05)
            for a in advantages
        ]
        return [
            -4 / tau / (1 + torch.exp(-tau * (torch.exp(log_r[i]) - 1))) * advantages[i]
            for i, tau in enumerate(taus)
        ]
    if loss in ("gspo", "gspo_token", "gmpo"):
        terms = [None] * count
        for members in by_sequence(rows):
            mean = sum(log_r[i] for i in members) / len(members)
            if loss == "gmpo":
                low, high = (
                    settings.get("eps_clip", 0.4),
                    settings.get("eps_clip_higher", settings.get("eps_clip", 0.4)),
                )
                kept = []
                for i in members:
                    s = sign(advantages[i])
                    kept.append(s * torch.minimum(s * log_r[i], s * torch.clamp(log_r[i], -low, high)))
                mean = sum(kept) / len(kept)
            for i in members:
                if loss == "gmpo":
                    terms[i] = -advantages[i] * torch.exp(mean)
                elif loss == "gspo":
                    terms[i] = ppo_row(settings, advantages[i], mean, 3e-4, 4e-4)
                else:
                    log_s = sum(frozen_r[i] for i in members) / len(members) + live[i] - frozen[i]
                    terms[i] = ppo_row(settings, advantages[i], log_s, 3e-4, 4e-4)
        return terms
    if loss in ("dppo_tv", "dppo_kl"):
        terms = []
        for i in range(count):
            pi, mu = math.exp(frozen[i]), math.exp(rows["behaviour"][i])
            if loss == "dppo_tv":
                distance = abs(pi - mu)
            else:
                distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
            a = advantages[i]
            beyond = distance > settings.get("dppo_threshold", 0.2)
            away = pi > mu if a > 0 else mu > pi
            weight = 0.0 if beyond and away else min(math.exp(frozen_r[i]), 20.0)
            terms.append(-weight * a * live[i])
        return terms
    if loss in ("clip_cov", "kl_cov"):
        mean_a, mean_p = sum(advantages) / count, sum(p.item() for p in frozen) / count
        c = [(advantages[i] - mean_a) * (frozen[i].item() - mean_p) for i in range(count)]
        if loss == "kl_cov":
            chosen = sorted(range(count), key=lambda i: -c[i])[
                : max(1, int(settings["kl_cov_ratio"] * count))
            ]
            coefficient = settings.get("ppo_kl_coef", 1.0)
            return [
                -torch.exp(log_r[i]) * advantages[i] + (coefficient * abs(log_r[i]) if i in chosen else 0.0)
                for i in range(count)
            ]
        assert settings["clip_cov_ratio"] == 1.0, "else the draw is the program's own"
        terms = []
        for i in range(count):
            value, r = ppo_row(settings, advantages[i], log_r[i]), math.exp(frozen_r[i])
            is_free = abs(ppo_row(settings, advantages[i], frozen_r[i]).item() + r * advantages[i]) < 1e-12
            inside = settings["clip_cov_lb"] < c[i] < settings["clip_cov_ub"]
            terms.append(0.0 * value if is_free and inside else value)
        return terms
    raise AssertionError(loss)


def correction_factors(settings, rows, log_w, frozen):
    """Returns one number a row: the combined factor of all corrections of the settings for log w."""
    count = len(log_w)
    name, level = settings.get("correction", "auto"), settings.get("correction_level", "token")
    sequences = by_sequence(rows)
    rejection = settings.get("rejection_sampling")
    factors = [1.0] * count
    if rejection:
        factors = rejection_sampling(rejection, log_w, sequences)
    elif name in ("auto", "cap"):
        cap = settings.get("behave_imp_weight_cap", 5.0)
        takes_old = settings["loss"] not in ("pg", "dppo_tv", "dppo_kl")
        if name == "cap" or (settings.get("use_decoupled_loss", True) and takes_old):
            factors = [math.exp(x) if cap is None or math.exp(x) <= cap else 0.0 for x in log_w]
    elif name != "none":
        levels = list(log_w)
        for members in sequences:
            total = sum(log_w[i] for i in members)
            for i in members:
                if level == "sequence":
                    levels[i] = max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, total))
                elif level == "geometric":
                    levels[i] = total / len(members)
        geometric = level == "geometric"
        default = {
            "tis": (0.0, 2.0),
            "icepop": (0.5, 5.0),
            "masked_is": (0.9999, 1.0001) if geometric else (0.5, 2.0),
            "rejection": (0.9999, 1.0001) if geometric else (0.5, 2.0),
        }[name]
        low, high = settings.get("correction_lower", default[0]), settings.get("correction_upper", default[1])
        weights = [math.exp(x) for x in levels]
        if name == "tis":
            factors = [min(max(w, low), high) for w in weights]
        elif name == "icepop" or name == "masked_is":
            factors = [w if low <= w <= high else 0.0 for w in weights]
        else:
            factors = [1.0 if low <= w <= high else 0.0 for w in weights]
        if name in ("masked_is", "rejection"):
            veto = settings.get("correction_veto", 1e-4)
            for members in sequences:
                if any(math.exp(log_w[i]) < veto for i in members):
                    for i in members:
                        factors[i] = 0.0
    if "off_policy_mask_threshold" in settings:
        for members in sequences:
            distance = sum(rows["behaviour"][i] - frozen[i].item() for i in members) / len(members)
            for i in members:
                if distance > settings["off_policy_mask_threshold"] and rows["advantages"][i] < 0:
                    factors[i] = 0.0
    if "m2_threshold" in settings:
        left = sorted(range(count), key=lambda i: log_w[i] ** 2)
        while left and sum(log_w[i] ** 2 for i in left) / len(left) >= settings["m2_threshold"]:
            factors[left.pop()] = 0.0
    return factors


def rejection_sampling(config, log_w, sequences):
    """AReaL's apply_rejection_sampling, except for k3: AReaL's code takes k3 in the opposite direction."""
    metric, level, how = (
        config.get("metric", "ratio"),
        config.get("level", "token"),
        config.get("agg", "mean"),
    )
    functions = {
        "ratio": lambda x: x,
        "kl_k1": lambda x: x,
        "kl_k2": lambda x: x * x / 2,
        "kl_k3": lambda x: math.exp(x) - 1 - x,
    }
    values = [functions[metric](x) for x in log_w]
    weights = [math.exp(x) for x in log_w]
    if level == "sequence":
        for members in sequences:
            own = [values[i] for i in members]
            one = {"sum": sum(own), "mean": sum(own) / len(own), "max": max(own)}[how]
            mean = sum(log_w[i] for i in members) / len(members)
            for i in members:
                values[i] = one
                if metric == "ratio":
                    weights[i] = math.exp(mean)
    if metric == "ratio":
        values = [math.exp(x) for x in values]
    low, high = config.get("lower"), config.get("upper", 5.0)
    inside = [x <= high and (low is None or x >= low) for x in values]
    if config.get("action", "mask") == "mask":
        return [w if ok else 0.0 for w, ok in zip(weights, inside, strict=True)]
    return [w if ok else min(max(w, low or 0.0), high) for w, ok in zip(weights, inside, strict=True)]


def old_log_probs(settings, rows, frozen, is_current):
    decoupled = settings.get("use_decoupled_loss", True)
    if settings.get("prox_logp_method") == "loglinear":
        out = []
        for i, version in enumerate(rows["versions"]):
            age = rows["version"] - version
            a = 0.0 if age <= 0 else min(max((age - 1) / age, 0.0), 1.0)
            out.append(rows["behaviour"][i] + a * (frozen[i].item() - rows["behaviour"][i]))
        return out
    if is_current:
        return [x.item() for x in frozen]
    return rows["proximal"] if decoupled or settings.get("recompute_logprob", True) else rows["behaviour"]


MASK64 = (1 << 64) - 1


def philox(counter, key):
    """Philox4x32-10 (Salmon et al. 2011)."""
    for _ in range(10):
        products = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = (
            (products[1] >> 32) ^ counter[1] ^ key[0],
            products[1] & 0xFFFFFFFF,
            (products[0] >> 32) ^ counter[3] ^ key[1],
            products[0] & 0xFFFFFFFF,
        )
        key = (key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF
    return counter


def obrs(settings, rows, log_w, is_current, kept):
    """Equation 2 of distillsparse, with Z from the top-k tokens (four) and the rest. `kept`: the accepted
    rows."""
    lam, cap = settings.get("obrs_lambda", 1.0), settings.get("correction_upper", 3.0)
    count = len(log_w)
    old = rows["given"] if is_current else rows["proximal_given"]
    acceptance = [min(1.0, math.exp(x) / lam) for x in log_w]
    known, rest = [], []
    for own_mu, own_pi in zip(rows["behaviour_given"], old, strict=True):
        pairs = [(math.exp(mu), math.exp(pi) / lam) for mu, pi in zip(own_mu, own_pi, strict=True)]
        known.append(sum(min(pair) for pair in pairs))
        rest.append(max(0.0, min(1 - sum(mu for mu, _ in pairs), 1 / lam - sum(pi for _, pi in pairs))))
    if settings.get("obrs_normalizer") == "scaled":
        kappa = sum(acceptance) / sum(known)
        weights = [kappa * z * min(max(lam, math.exp(x)), cap) for z, x in zip(known, log_w, strict=True)]
    else:
        kappa = max(0.0, min(1.0, (sum(acceptance) - sum(known)) / sum(rest))) if sum(rest) else 0.0
        weights = [
            min((z + kappa * u) * max(lam, math.exp(x)), cap)
            for z, u, x in zip(known, rest, log_w, strict=True)
        ]
    share = sum(kept) / count
    return [k * weight / share if share else 0.0 for k, weight in zip(kept, weights, strict=True)]


def kl_estimate(kind, log_p, log_q):
    d = log_q - log_p
    return {"k1": lambda: -d, "k2": lambda: d * d / 2, "k3": lambda: math.e**d - d - 1}[kind]()


def top_kl(log_p, log_q):
    """KL of two distributions over the top-k tokens and one entry for all other tokens."""
    rest_p, rest_q = 1 - sum(torch.exp(x) for x in log_p), 1 - sum(math.exp(x) for x in log_q)
    own = sum(torch.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))
    return own + rest_p * (torch.log(rest_p) - math.log(rest_q))


def reference(settings, rows, live, frozen, is_current, given=None, kept=None):
    """Returns the loss and the corrections' factors. `given`: log pi of the top-k tokens, a list a row."""
    count = len(rows["advantages"])
    teacher = settings.get("teacher", {})
    mode, weight = teacher.get("loss_mode", "k1"), teacher.get("distill_loss_weight", 1.0)
    if teacher:
        rl = teacher.get("rl_loss_weight", 1.0)
        pull = [rows["teacher"][i] - frozen[i].item() if mode == "k1" else 0.0 for i in range(count)]
        added = [rl * a + weight * x for a, x in zip(rows["advantages"], pull, strict=True)]
        rows = rows | {"advantages": added}
    old = old_log_probs(settings, rows, frozen, is_current)
    against = rows["behaviour"] if settings["loss"].startswith("dppo") else old
    log_r, frozen_r = (
        [torch.clamp(x[i] - against[i], -MAX_LOG_RATIO, MAX_LOG_RATIO) for i in range(count)]
        for x in (live, frozen)
    )
    # If pi_old is mu, the importance weights are those of the current policy, and no correction applies to
    # them.
    log_w = [max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, old[i] - rows["behaviour"][i])) for i in range(count)]
    if settings.get("correction") == "obrs":
        factors = obrs(settings, rows, log_w, is_current, kept)
    else:
        factors = correction_factors(settings, rows, log_w, frozen)
    terms = policy_terms(settings, rows, live, frozen, log_r, frozen_r)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(count):
        value = factors[i] * terms[i]
        if settings.get("kl_loss_coef"):
            kind = settings.get("kl_loss_type", "k3")
            kl = kl_estimate("k3" if kind == "unbiased" else kind, live[i], rows["reference"][i])
            if kind == "unbiased":
                kl = kl * torch.exp(live[i] - old[i])
            value = value + settings["kl_loss_coef"] * kl
        if teacher and mode == "topk":
            value = value + weight * top_kl(given[i], rows["teacher_given"][i])
        elif teacher and mode != "k1":
            value = value + weight * kl_estimate(mode, live[i], rows["teacher"][i])
        value = value - settings.get("entropy_coef", 0.0) * rows["entropies"][i]
        total = total + rows["weights"][i] * value
    return total, factors


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
    {"loss": "gspo", "correction": "obrs", "obrs_lambda": 1.3},
]
CASES = [({"loss": name} | settings) for name, settings in LOSSES.items()]
CASES += [({"loss": "ppo"} | settings) for settings in OBRS]
CASES += [({"loss": "ppo", "eps_clip": 0.3} | settings) for settings in CORRECTIONS]


def request_of(settings, rows, is_current):
    request = {"actor": json.dumps(settings), "rows": {k: v for k, v in rows.items() if k != "version"}}
    return request | {"proximal_is_current": is_current, "version": rows["version"]}


def gradient(settings, rows, is_current, kept=None):
    frozen = [torch.tensor(x, dtype=torch.float64) for x in rows["log_probs"]]
    live = [x.clone().requires_grad_(True) for x in frozen]
    given = [[torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in own] for own in rows["given"]]
    loss, factors = reference(settings, rows, live, frozen, is_current, given, kept)
    leaves = live + [x for own in given for x in own]
    gradients = [0.0 if d is None else d.item() for d in torch.autograd.grad(loss, leaves, allow_unused=True)]
    return loss.item(), gradients[: len(live)], factors, gradients[len(live) :]


def uniforms(version, count):
    """The uniform numbers of base/random.h for purpose `acceptance` (5) and seed 0."""
    mixed = philox((0, 0, 5, 0), (0x426F7567, 0x68))
    key = mixed[0], mixed[1]
    out = []
    for row in range(count):
        x = philox((row & 0xFFFFFFFF, row >> 32, version & 0xFFFFFFFF, version >> 32), key)
        bits = ((x[1] << 32) | x[0]) & MASK64
        out.append(((bits >> 12) + 0.5) / (1 << 52))
    return out


def accepted(settings, rows, is_current):
    """Returns 0 or 1 a row: 1 if obrs keeps the row."""
    frozen = [torch.tensor(x, dtype=torch.float64) for x in rows["log_probs"]]
    old = old_log_probs(settings, rows, frozen, is_current)
    lam = settings.get("obrs_lambda", 1.0)
    return [
        int(u < min(1.0, math.exp(old[i] - rows["behaviour"][i]) / lam))
        for i, u in enumerate(uniforms(rows["version"], len(old)))
    ]


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
        if settings.get("teacher", {}).get("loss_mode") == "topk":
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
    for i in range(len(given)) if settings.get("teacher", {}).get("loss_mode") == "topk" else ():
        at = []
        for step in (h, -h):
            moved = [list(own) for own in given]
            moved[i][1] = moved[i][1] + step
            at.append(reference(settings, rows, frozen, frozen, False, moved)[0])
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


MU, PI = [0.3, 0.25, 0.2, 0.15, 0.06, 0.04], [0.25, 0.1, 0.3, 0.05, 0.2, 0.1]


def rows_of_ids(ids, value, listed=6):
    """Rows that sampled these tokens of one context under MU. The engine lists the first `listed` tokens."""
    log_mu, log_pi = [list(map(math.log, p)) for p in (MU, PI)]
    count = len(ids)
    return {
        "log_probs": [log_pi[i] for i in ids],
        "behaviour": [log_mu[i] for i in ids],
        "advantages": [value[i] for i in ids],
        "entropies": [0.0] * count,
        "weights": [1 / count] * count,
        "sequences": list(range(count)),
        "given": [log_pi[:listed]] * count,
        "behaviour_given": [log_mu[:listed]] * count,
        "version": 0,
    }


def obrs_factors(build_dir, ids, listed=6, **settings):
    """Returns the factor of each row, and the metrics. The loss of row r is -factor · pi / sg(pi) / rows."""
    rows = rows_of_ids(ids, [1.0] * len(MU), listed)
    settings = {"loss": "ppo", "correction": "obrs", "correction_upper": 100.0} | settings
    [answer] = run_tool(build_dir, [request_of(settings, rows, True)])
    return [-d * len(ids) for d in answer["d_log_probs"]], answer["metrics"]


@pytest.mark.parametrize("lam", [0.3, 0.8, 1.0, 1.7, 6.0])
@pytest.mark.parametrize("cap", [1.0, 1.3, 100.0])
def test_obrs_expectation_over_the_vocabulary_is_that_of_the_trainer(build_dir, lam, cap):
    """The sum over the vocabulary of mu · a · F(pi / mu') · f / Z, with the factors of the program, is the
    sum of pi · f if F cuts nothing, and the sum of mu' · F · f otherwise. Every step is exact."""
    draw = random.Random(7)
    value = [draw.gauss(0, 1) for _ in MU]
    accept = [min(1.0, p / (lam * m)) for m, p in zip(MU, PI, strict=True)]
    z = sum(m * a for m, a in zip(MU, accept, strict=True))
    kept_distribution = [m * a / z for m, a in zip(MU, accept, strict=True)]
    ids = [i for i in range(len(MU)) for _ in range(100)]  # each token is kept at least once
    factors, metrics = obrs_factors(build_dir, ids, obrs_lambda=lam, correction_upper=cap)
    assert metrics["mismatch/obrs_z"] == pytest.approx(z, rel=1e-12)
    kept = metrics["mismatch/obrs_accepted"]  # the factors are divided by this share
    weight = [max(f for f, i in zip(factors, ids, strict=True) if i == token) * kept for token in range(6)]
    assert min(weight) > 0, "a token was never kept"
    cut = [min(p / q, cap) for p, q in zip(PI, kept_distribution, strict=True)]
    assert weight == pytest.approx(cut, rel=1e-10)
    got = sum(q * w * f for q, w, f in zip(kept_distribution, weight, value, strict=True))
    expected = sum(p * f for p, f in zip(PI, value, strict=True))
    if cap == 100.0:
        assert got == pytest.approx(expected, rel=1e-10)
    elif lam < 1:
        assert abs(got - expected) > 1e-3, "this cap cuts something"
    # A row is kept with its token's probability a, or not at all.
    for token, a in enumerate(accept):
        share = sum(f > 0 for f, i in zip(factors, ids, strict=True) if i == token) / 100
        assert share == pytest.approx(a, abs=0.15)


def test_obrs_is_truncated_sampling_or_rejection_at_the_ends_of_its_budget(build_dir):
    """A small lambda keeps every token with the weight of `tis`. A lambda above the largest w gives all kept
    tokens one weight. Equal settings and versions keep equal rows."""
    ids = [i for i in range(len(MU)) for _ in range(50)]
    ratios = [PI[i] / MU[i] for i in ids]
    factors, metrics = obrs_factors(build_dir, ids, obrs_lambda=0.01, correction_upper=1.2)
    assert metrics["mismatch/obrs_accepted"] == 1
    assert factors == pytest.approx([min(w, 1.2) for w in ratios], rel=1e-12)
    factors, metrics = obrs_factors(build_dir, ids, obrs_lambda=max(ratios) * 1.01)
    kept = [f for f in factors if f > 0]
    assert 0 < len(kept) < len(ids)
    assert max(kept) == pytest.approx(min(kept), rel=1e-12)
    assert min(kept) * metrics["mismatch/obrs_accepted"] == pytest.approx(1, rel=1e-12)
    again, _ = obrs_factors(build_dir, ids, obrs_lambda=max(ratios) * 1.01)
    assert again == factors


def test_obrs_normalizer_lies_between_the_listed_tokens_and_the_bound_of_the_rest(build_dir):
    """With half of the vocabulary listed, the mean of Z is that of the acceptance, which has no bias. The
    variant `scaled` cuts before it multiplies by Z."""
    draw = random.Random(3)
    ids = draw.choices(range(6), MU, k=4000)
    z = sum(map(min, MU, PI))
    listed = sum(map(min, MU[:3], PI[:3]))
    _, metrics = obrs_factors(build_dir, ids, listed=3)
    assert metrics["mismatch/obrs_z"] == pytest.approx(metrics["mismatch/obrs_acceptance"], rel=1e-12)
    assert metrics["mismatch/obrs_z"] == pytest.approx(z, abs=0.02)
    assert listed < metrics["mismatch/obrs_z"] < listed + min(1 - sum(MU[:3]), 1 - sum(PI[:3]))
    # Samples that are all accepted, or hardly: Z stays inside its bounds.
    for token, bound in ((4, listed + min(1 - sum(MU[:3]), 1 - sum(PI[:3]))), (3, listed)):
        _, metrics = obrs_factors(build_dir, [token] * 50, listed=3)
        assert metrics["mismatch/obrs_z"] == pytest.approx(bound, rel=1e-12)
    scaled, metrics = obrs_factors(build_dir, ids, obrs_normalizer="scaled", correction_upper=1.2)
    largest = max(scaled) * metrics["mismatch/obrs_accepted"]
    assert largest == pytest.approx(1.2 * metrics["mismatch/obrs_acceptance"], rel=1e-12)


def test_obrs_samples_are_those_of_the_trainer(build_dir):
    """For any f (here the advantages), the weighted mean of f over the accepted samples of mu equals the mean
    of f under pi_old. The whole vocabulary is given, so Z is exact. The acceptance numbers are uniform."""
    draw = random.Random(3)
    value = [draw.gauss(0, 1) for _ in MU]
    rows = rows_of_ids(draw.choices(range(len(MU)), MU, k=20000), value)
    settings = {"loss": "ppo", "correction": "obrs", "correction_upper": 100.0}
    [answer] = run_tool(build_dir, [request_of(settings, rows, True)])
    z = sum(map(min, MU, PI))
    metrics = answer["metrics"]
    assert metrics["mismatch/obrs_z"] == pytest.approx(z, rel=1e-12)
    assert metrics["mismatch/obrs_accepted"] == pytest.approx(z, abs=0.015)
    assert metrics["mismatch/factor_mean"] == pytest.approx(1, abs=0.03)
    expected = -sum(p * v for p, v in zip(PI, value, strict=True))
    assert answer["loss"] == pytest.approx(expected, abs=0.05)
    biased = -sum(m * v for m, v in zip(MU, value, strict=True))
    assert abs(biased - expected) > 0.2, "without the correction the mean would be another"


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
                {"correction": "obrs", "obrs_normalizer": "all"},
                {"correction": "obrs", "prox_logp_method": "loglinear"},
                {"correction": "obrs", "teacher": {"path": "t", "loss_mode": "topk"}},
            )
        ],
    )
    wanted = [
        "kl_ctrl.type",
        "ref_model_sync_steps",
        "correction_lower",
        "correction_upper",
        "correction_upper",
        "obrs_normalizer",
        "prox_logp_method",
        "teacher.loss_mode",
    ]
    assert all(name in e["error"] for name, e in zip(wanted, errors, strict=True)), errors


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
