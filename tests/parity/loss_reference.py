"""Losses and corrections in plain Python and torch, written from their equations (docs/algorithms.md), for
the tests of this folder. `run_tool` asks Bough for the same."""

import json
import math
import random
import subprocess

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
    rows["reference_given"] = rows["teacher_given"][1:] + rows["teacher_given"][:1]
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
    """Equation 2 of distillsparse, with Z from the top-k tokens (four) and the rest, or without Z. `kept`:
    the accepted rows."""
    lam, cap = settings.get("obrs_lambda", 1.0), settings.get("correction_upper", 3.0)
    count = len(log_w)
    old = rows["given"] if is_current else rows["proximal_given"]
    acceptance = [min(1.0, math.exp(x) / lam) for x in log_w]
    if settings.get("obrs_normalizer") == "none":
        return [k * min(max(lam, math.exp(x)), cap) for k, x in zip(kept, log_w, strict=True)]
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
            if kind == "topk":
                kl = top_kl(given[i], rows["reference_given"][i])
            else:
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
