"""The correction obrs (DistillSparse, equation 2) on a small vocabulary: expectations over all tokens."""

import math
import random

import pytest
from loss_reference import request_of, run_tool

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


@pytest.mark.parametrize("lam", [0.3, 1.0, 1.7])
def test_obrs_without_z_has_the_mean_of_the_trainer_in_each_context(build_dir, lam):
    """mu · a · factor = pi for each token: the factors' mean over the acceptance is w. Nothing is divided by
    the share of kept rows, and no top-k tokens are listed."""
    ids = [i for i in range(len(MU)) for _ in range(100)]
    rows = rows_of_ids(ids, [1.0] * len(MU))
    del rows["given"], rows["behaviour_given"]
    settings = {"loss": "ppo", "correction": "obrs", "obrs_normalizer": "none", "obrs_lambda": lam}
    [answer] = run_tool(build_dir, [request_of(settings | {"correction_upper": 100.0}, rows, True)])
    assert answer["separable"]
    factors = [-d * len(ids) for d in answer["d_log_probs"]]
    for token, (mu, pi) in enumerate(zip(MU, PI, strict=True)):
        kept = {f for f, i in zip(factors, ids, strict=True) if i == token and f > 0}
        accept = min(1.0, pi / (lam * mu))
        assert mu * accept * max(kept) == pytest.approx(pi, rel=1e-10)
        assert max(kept) == pytest.approx(min(kept), rel=1e-12)
    assert "mismatch/obrs_z" not in answer["metrics"]
    assert answer["metrics"]["mismatch/factor_mean"] == pytest.approx(sum(factors) / len(factors))
