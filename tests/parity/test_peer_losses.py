"""Losses, advantages, corrections, KL estimators and controllers against the peers' own code. Single
functions are taken out of the peers' wheels, so none of their dependencies is needed. scripts/setup downloads
the wheels (requirements-peer-losses.txt) to .venv/peer-wheels. BOUGH_PEER_WHEELS names another folder. If
neither folder has the wheels, these tests are skipped.

If Bough differs from a peer on purpose, a test named `..._differently` says how and why."""

import ast
import json
import math
import os
import types
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from loss_reference import random_rows, request_of, run_tool
from test_advantages import random_groups

ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.environ.get("BOUGH_PEER_WHEELS") or str(ROOT / ".venv" / "peer-wheels")


def parsed(wheel, path):
    """Returns the syntax tree of one file of a wheel."""
    found = sorted(Path(FOLDER).glob(f"{wheel}-*.whl"))
    if not found:
        pytest.skip(f"no {wheel} wheel in {FOLDER}")
    with zipfile.ZipFile(found[-1]) as archive:
        return ast.parse(archive.read(path))


def functions(wheel, path, names, **namespace):
    """Returns functions and classes of one file of a wheel, without its imports, decorators and
    annotations."""
    chosen = [node for node in parsed(wheel, path).body if getattr(node, "name", None) in names]
    assert {node.name for node in chosen} == set(names), path
    return compiled(chosen, path, namespace)


def compiled(chosen, path, namespace):
    for node in chosen:
        node.decorator_list = []
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef):
                inner.returns = None
                for argument in inner.args.args + inner.args.kwonlyargs:
                    argument.annotation = None
    scope = {"torch": torch, **namespace}
    exec(compile(ast.Module(chosen, []), path, "exec"), scope)
    return types.SimpleNamespace(**{node.name: scope[node.name] for node in chosen})


class Config(dict):
    """The settings that verl's losses read."""

    __getattr__ = dict.get


def padded(rows, name):
    """Returns the padded column [sequences, longest] and the mask."""
    members = {}
    for value, sequence in zip(rows[name], rows["sequences"], strict=True):
        members.setdefault(sequence, []).append(value)
    longest = max(map(len, members.values()))
    values = [own + [0.0] * (longest - len(own)) for own in members.values()]
    mask = [[1] * len(own) + [0] * (longest - len(own)) for own in members.values()]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(mask)


def token_mean_weights(rows):
    return [1 / len(rows["sequences"])] * len(rows["sequences"])


def sequence_mean_weights(rows):
    counts = [rows["sequences"].count(sequence) for sequence in rows["sequences"]]
    return [1 / (len(set(rows["sequences"])) * count) for count in counts]


def assert_equal(build_dir, settings, weights, peer, change=dict):
    """`peer` computes the loss from log_probs, the mask and a function that returns other columns. All
    columns are padded. `change` changes the rows first."""
    batches = [change(random_rows(seed) | {"version": 4}) for seed in range(6)]
    for rows in batches:
        rows["weights"] = weights(rows)
    requests = [request_of(settings, rows, False) for rows in batches]
    for rows, answer in zip(batches, run_tool(build_dir, requests), strict=True):
        assert "error" not in answer, answer
        log_probs, mask = padded(rows, "log_probs")
        log_probs.requires_grad_(True)
        loss = peer(log_probs, mask, lambda name, rows=rows: padded(rows, name)[0])
        loss.backward()
        # verl adds 1e-8 to the number of tokens of a sequence.
        assert answer["loss"] == pytest.approx(loss.item(), abs=1e-7)
        assert answer["d_log_probs"] == pytest.approx(log_probs.grad[mask.bool()].tolist(), abs=1e-7)


VERL = "verl/trainer/ppo/core_algos.py"
TORCH_FUNCTIONAL = "verl/utils/torch_functional.py"
NARROW = {"eps_clip": 0.1, "eps_clip_higher": 0.2}
VERL_LOSSES = {
    "vanilla": ({"loss": "ppo", "c_clip": 3.0} | NARROW, "token-mean"),
    "gspo": ({"loss": "gspo_token", "eps_clip": 0.02, "eps_clip_higher": 0.04}, "seq-mean-token-mean"),
    "cispo": ({"loss": "cispo"} | NARROW, "token-mean"),
    "geo_mean": ({"loss": "gmpo", "eps_clip": 0.05, "eps_clip_higher": 0.1}, "seq-mean-token-mean"),
    "sapo": ({"loss": "sapo", "sapo_tau_pos": 1.5, "sapo_tau_neg": 2.5}, "seq-mean-token-mean"),
    "gpg": ({"loss": "pg"}, "token-mean"),
    "dppo_tv": ({"loss": "dppo_tv", "dppo_threshold": 0.05}, "token-mean"),
    "dppo_kl": ({"loss": "dppo_kl", "dppo_threshold": 0.01}, "token-mean"),
    # A ratio of 1 drops all qualifying tokens, so the random choice, which differs by program, does not
    # matter.
    "clip_cov": (
        {"loss": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 1.0} | NARROW,
        "token-mean",
    ),
    "kl_cov": ({"loss": "kl_cov", "kl_cov_ratio": 0.15, "ppo_kl_coef": 0.7}, "token-mean"),
}


def verl_losses(*names):
    masked = functions("verl", TORCH_FUNCTIONAL, ["masked_sum", "masked_mean"])
    return functions(
        "verl",
        VERL,
        ["agg_loss", *names],
        verl_F=masked,
        ActorConfig=Config,
        AlgoConfig=types.SimpleNamespace,
        Any=None,
    )


@pytest.mark.parametrize("name", VERL_LOSSES)
def test_losses_are_verls(build_dir, name):
    settings, how = VERL_LOSSES[name]
    loss = getattr(verl_losses(f"compute_policy_loss_{name}"), f"compute_policy_loss_{name}")
    threshold = settings.get("dppo_threshold")
    config = Config(
        clip_ratio=threshold or 0.2,
        clip_ratio_low=settings.get("eps_clip"),
        clip_ratio_high=settings.get("eps_clip_higher"),
        clip_ratio_c=20.0 if threshold else 3.0,
        tau_pos=settings.get("sapo_tau_pos"),
        tau_neg=settings.get("sapo_tau_neg"),
        policy_loss=Config(settings),
        global_batch_info={},
    )
    # DPPO's ratio is against mu (the paper's equation). verl's ratio is against old_log_prob, which is mu
    # only in verl's bypass mode.
    old = "behaviour" if threshold else "proximal"

    def peer(log_probs, mask, column):
        arguments = (column(old), log_probs, column("advantages"), mask)
        return loss(*arguments, loss_agg_mode=how, config=config)[0]

    weights = token_mean_weights if how == "token-mean" else sequence_mean_weights
    # verl has no separate importance weight against mu here.
    assert_equal(build_dir, settings | {"correction": "none"}, weights, peer)


def test_kl_estimators_and_the_controller_are_verls(build_dir):
    verl = functions("verl", VERL, ["kl_penalty_forward", "AdaptiveKLController"], np=__import__("numpy"))
    for kind in ("k2", "k3"):
        settings = {"loss": "pg", "kl_loss_coef": 0.7, "kl_loss_type": kind}
        for seed in range(4):
            rows = random_rows(seed) | {"version": 4}
            [answer] = run_tool(build_dir, [request_of(settings, rows, False)])
            log_probs = torch.tensor(rows["log_probs"], dtype=torch.float64)
            other = torch.tensor(rows["reference"], dtype=torch.float64)
            expected = verl.kl_penalty_forward(log_probs, other, kind) @ torch.tensor(
                rows["weights"], dtype=torch.float64
            )
            # verl clamps k3 at 10, and these rows stay below 10. Bough keeps the tail: it holds the policy
            # near.
            assert answer["metrics"]["loss/kl"] == pytest.approx(expected.item(), abs=1e-10)
    controller = verl.AdaptiveKLController(0.1, 0.05, 1000)
    steps = [{"kl": 0.01 * i, "sequences": 32, "entropy": 0} for i in range(12)]
    settings = {"kl_ctl": 0.1, "kl_ctrl": {"type": "adaptive", "target_kl": 0.05, "horizon": 1000}}
    [answer] = run_tool(build_dir, [{"actor": json.dumps(settings), "kl": steps}])
    for step, got in zip(steps, answer["kl_ctl"], strict=True):
        controller.update(step["kl"], step["sequences"])
        assert got == pytest.approx(controller.value, rel=1e-12)


def comparable_groups(name, seed):
    """A random batch without sequences that have no token, since verl's batches have none. Groups for which
    Bough differs on purpose are left out too (test_groups_of_one_differ_from_verl)."""
    batch = random_groups(seed)
    keep = [i for i, n in enumerate(batch["tokens"]) if n > 0]
    batch = {key: [values[i] for i in keep] for key, values in batch.items()}
    alone = [batch["groups"].count(group) == 1 for group in batch["groups"]]
    if name in ("dr_grpo", "rloo", "reinforce_plus_plus_baseline"):
        batch = {
            key: [v for v, one in zip(values, alone, strict=True) if not one] for key, values in batch.items()
        }
    return batch if len(batch["rewards"]) > 2 else None


def test_advantages_are_verls(build_dir):
    """Each sequence's reward is on its last token."""
    names = {
        "grpo": "grpo_outcome",
        "dr_grpo": "grpo_outcome",
        "rloo": "rloo_outcome",
        "reinforce_plus_plus": "reinforce_plus_plus_outcome",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline_outcome",
        "opo": "opo_outcome",
        "remax": "remax_outcome",
        "gdpo": "gdpo_outcome",
    }
    masked = functions("verl", TORCH_FUNCTIONAL, ["masked_sum", "masked_mean", "masked_var", "masked_whiten"])
    verl = functions(
        "verl",
        VERL,
        [f"compute_{name}_advantage" for name in sorted(set(names.values()))],
        verl_F=masked,
        np=np,
        defaultdict=defaultdict,
    )
    settings = {
        "reinforce_plus_plus": {"discount": 0.9},
        "gdpo": {"gdpo_weights": [1.0, 0.0]},
    }
    for name, function in names.items():
        batches = [batch for seed in range(12) if (batch := comparable_groups(name, seed))]
        assert len(batches) > 3, name
        actor = {"adv_estimator": name} | settings.get(name, {})
        requests = [{"actor": json.dumps(actor)} | batch for batch in batches]
        for batch, answer in zip(batches, run_tool(build_dir, requests), strict=True):
            assert "error" not in answer, answer
            longest = max(batch["tokens"])
            mask = torch.tensor([[t < n for t in range(longest)] for n in batch["tokens"]]).double()
            # verl's single reward is the fallback of GDPO. The weighted sum of two is tested in
            # test_advantages.py.
            values = [p[0] for p in batch["parts"]] if name == "gdpo" else batch["rewards"]
            rewards = torch.zeros_like(mask)
            for i, n in enumerate(batch["tokens"]):
                rewards[i, n - 1] = values[i]
            arguments = {"response_mask": mask, "index": np.array(batch["groups"])}
            if name in ("grpo", "dr_grpo"):
                arguments["norm_adv_by_std_in_grpo"] = name == "grpo"
            if name == "reinforce_plus_plus":
                arguments = {"response_mask": mask, "config": Config(gamma=0.9)}
            if name == "remax":
                baselines = torch.tensor(batch["baselines"]).double()
                arguments = {"response_mask": mask, "reward_baselines": baselines}
            expected = getattr(verl, f"compute_{function}_advantage")(rewards, **arguments)[0]
            for i, own in enumerate(answer["advantages"]):
                n = batch["tokens"][i]
                got = own if len(own) == n else own * n
                # verl stores constants of its own in fp32.
                assert got == pytest.approx(expected[i, :n].tolist(), abs=2e-6), name


def test_groups_of_one_differ_from_verl(build_dir):
    """A group of one sample has nothing to compare the sample with. verl gives the sample its whole reward.
    If rewards are above 0, this moves the policy towards anything that it did. In Bough, Dr.GRPO and the
    baseline form of REINFORCE++ give 0, and RLOO is an error. GRPO gives R / (1 + eps), as in verl (AReaL and
    TRL give 0)."""
    alone = {"rewards": [3.0], "groups": [0], "tokens": [2], "parts": [[]]}
    answers = run_tool(
        build_dir,
        [
            {"actor": f"adv_estimator: {name}"} | alone
            for name in ("grpo", "dr_grpo", "reinforce_plus_plus_baseline", "rloo")
        ],
    )
    assert answers[0]["advantages"][0] == pytest.approx([3 / (1 + 1e-6)])
    assert answers[1]["advantages"] == answers[2]["advantages"] == [[0.0]]
    assert "n_samples" in answers[3]["error"]


ROLLOUT_CORRECTION = "verl/trainer/ppo/rollout_corr_helper.py"


def verl_corrections():
    masked = functions("verl", TORCH_FUNCTIONAL, ["masked_sum", "masked_mean"])
    options = {
        f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3")
    }
    return functions(
        "verl",
        ROLLOUT_CORRECTION,
        [
            "_parse_rollout_is_threshold",
            "_parse_rollout_rs_thresholds",
            "compute_rollout_rejection_mask",
            "compute_rs_metrics",
            "compute_rollout_correction_weights",
            "compute_is_metrics",
        ],
        verl_F=masked,
        math=math,
        Optional=__import__("typing").Optional,
        SAFETY_BOUND=20.0,
        SUPPORTED_ROLLOUT_RS_OPTIONS=options - {"seq_max_k1"},
        TOKEN_LEVEL_ROLLOUT_RS_OPTIONS={"token_k1", "token_k2", "token_k3"},
    )


def factors_of(build_dir, cases):
    """Returns each row's factor, by which the corrections multiply its policy term, and the metrics. A case
    is settings, log w and sequences. With `pg`, A = 1 and weights of 1, the factor is minus the loss's
    derivative."""
    requests = []
    for settings, log_w, sequences in cases:
        count = len(log_w)
        rows = {
            "log_probs": [-1.0] * count,
            "behaviour": [-2.0] * count,
            "proximal": [x - 2.0 for x in log_w],
            "advantages": [1.0] * count,
            "entropies": [0.0] * count,
            "weights": [1.0] * count,
            "sequences": sequences,
            "version": 0,
        }
        requests.append(request_of({"loss": "pg"} | settings, rows, False))
    answers = run_tool(build_dir, requests)
    assert all("error" not in answer for answer in answers), answers
    return [([-x for x in answer["d_log_probs"]], answer["metrics"]) for answer in answers]


def test_the_values_of_verls_test_rollout_corr_hold(build_dir):
    """Values of verl's test. test_mask_mode: weights 0.37 and 1.65, and the first sequence, half of the
    tokens, is rejected. IcePop maps 0.4, 0.8 and 6 to 0, 0.8 and 0: 2/3 lie outside the bounds, the deviation
    is 0.377, and the effective sample size is 1/3. TIS caps at 2."""
    masked = {"correction": "masked_is", "correction_lower": 0.5, "correction_upper": 2.0}
    mask_mode, icepop, tis = factors_of(
        build_dir,
        [
            (masked, [-1.0] * 5 + [0.5] * 5, [0] * 5 + [1] * 5),
            ({"correction": "icepop"}, [math.log(x) for x in (0.4, 0.8, 6.0)], [0, 0, 0]),
            ({"correction": "tis"}, [math.log(x) for x in (1.0, 6.0, 0.9, 1.1)], [0, 0, 1, 1]),
        ],
    )
    # verl keeps 0.37 as the weight and removes the tokens from the response mask. Bough's factor is 0, and
    # the tokens stay in the denominator, as in verl's other modes and in AReaL.
    assert mask_mode[0] == pytest.approx([0.0] * 5 + [math.exp(0.5)] * 5)
    assert mask_mode[1]["mismatch/masked_fraction"] == 0.5
    assert icepop[0] == pytest.approx([0.0, 0.8, 0.0])
    assert icepop[1]["mismatch/masked_fraction"] == pytest.approx(2 / 3)
    mean, mean_square = icepop[1]["mismatch/factor_mean"], icepop[1]["mismatch/factor_square_mean"]
    assert mean**2 / mean_square == pytest.approx(1 / 3), "the effective sample size"
    assert math.sqrt(mean_square - mean**2) == pytest.approx(0.3771236, abs=1e-6)
    assert tis[0] == pytest.approx([1.0, 2.0, 0.9, 1.1])
    assert tis[1]["mismatch/truncated_fraction"] == 0.25


def random_log_ws():
    """Yields six batches: log w, sequences, and padded log w with its mask."""
    for seed in range(6):
        rows = random_rows(seed)
        log_w = [p - b for p, b in zip(rows["proximal"], rows["behaviour"], strict=True)]
        yield log_w, rows["sequences"], *padded({"w": log_w, "sequences": rows["sequences"]}, "w")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [1.05, "0.9_1.1"])
def test_weights_are_verls(build_dir, level, threshold):
    verl = verl_corrections()
    settings = {"correction": "tis", "correction_upper": threshold, "correction_level": level}
    if threshold == "0.9_1.1":
        # verl's IcePop by sequence is `masked_is` in Bough. The veto of `masked_is` is switched off here.
        settings |= {"correction": "masked_is", "correction_veto": 0}
        settings |= {"correction_lower": 0.9, "correction_upper": 1.1}
    batches = list(random_log_ws())
    answers = factors_of(build_dir, [(settings, *batch[:2]) for batch in batches])
    for (_, _, log_w, mask), (factors, own) in zip(batches, answers, strict=True):
        weights, metrics = verl.compute_rollout_correction_weights(log_w, mask, level, threshold)
        assert factors == pytest.approx(weights[mask.bool()].tolist(), abs=1e-12)
        if threshold == "0.9_1.1":
            assert own["mismatch/masked_fraction"] == pytest.approx(metrics["rollout_is_oob_ratio"], abs=1e-6)


def verl_rejection(option, lower, upper):
    """The same rule as settings of rejection_sampling. For k1, verl compares 1 / w with the bounds and AReaL
    compares w, so their bounds are inverses of each other. k2 and k3 have no lower bound."""
    level, metric = option.split("_")[0], "kl_" + option[-2:]
    how = option.split("_")[1] if level == "seq" else "mean"
    rule = {"level": "sequence" if level == "seq" else "token", "metric": metric, "agg": how}
    if metric == "kl_k1":
        return rule | {"lower": -math.log(upper), "upper": -math.log(lower)}, f"{lower}_{upper}"
    return rule | {"upper": upper}, upper


@pytest.mark.parametrize(
    ("option", "lower", "upper"),
    [
        ("token_k1", 0.9, 1.2),
        ("token_k2", None, 0.01),
        ("token_k3", None, 0.01),
        ("seq_sum_k1", 0.9, 1.2),
        ("seq_sum_k2", None, 0.05),
        ("seq_sum_k3", None, 0.05),
        ("seq_mean_k1", 0.95, 1.1),
        ("seq_mean_k2", None, 0.01),
        ("seq_mean_k3", None, 0.01),
        ("seq_max_k2", None, 0.02),
        ("seq_max_k3", None, 0.02),
    ],
)
def test_each_rejection_option_is_verls(build_dir, option, lower, upper):
    """All options of test_rollout_corr.py's test_each_supported_rollout_rs_option."""
    verl = verl_corrections()
    rule, threshold = verl_rejection(option, lower, upper)
    seen = set()
    batches = list(random_log_ws())
    answers = factors_of(build_dir, [({"rejection_sampling": rule}, *batch[:2]) for batch in batches])
    for (_, _, log_w, mask), (factors, metrics) in zip(batches, answers, strict=True):
        kept, _ = verl.compute_rollout_rejection_mask(log_w, mask, option, threshold)
        expected = [int(x) for x in kept[mask.bool()].tolist()]
        assert [int(f != 0) for f in factors] == expected
        assert metrics["mismatch/masked_fraction"] == pytest.approx(1 - sum(expected) / len(expected))
        seen.update(expected)
    assert seen == {0, 1}, "the bounds decide nothing"


AREAL = "areal/utils/functional/functional.py"
AREAL_LOSSES = {
    "ppo": ({"eps_clip": 0.1}, {}),
    "higher": ({"eps_clip": 0.1, "eps_clip_higher": 0.2}, {}),
    "dual": ({"eps_clip": 0.1, "c_clip": 1.5}, {}),
    "sequence": ({"loss": "gspo", "eps_clip": 0.01, "eps_clip_higher": 0.02}, {}),
    "decoupled": (
        {"eps_clip": 0.1, "rejection_sampling": {"upper": 1.05}},
        {"upper": 1.05, "action": "mask", "level": "token", "metric": "ratio", "agg": "mean", "lower": None},
    ),
}


def areal_losses():
    estimator = functions("areal", "areal/utils/data.py", ["KLEstimator"])
    return functions(
        "areal",
        AREAL,
        [
            "_compute_sequence_level_ratio_and_advantages",
            "_check_bounds",
            "RejectionSamplingResult",
            "apply_rejection_sampling",
            "ppo_actor_loss_fn",
            "sapo_loss_fn",
        ],
        KLEstimator=estimator.KLEstimator,
    )


@pytest.mark.parametrize("name", AREAL_LOSSES)
def test_ppo_is_areals(build_dir, name):
    settings, rejection = AREAL_LOSSES[name]
    areal = areal_losses()
    areal.ppo_actor_loss_fn.__globals__["RejectionSamplingResult"] = types.SimpleNamespace
    more = {key: settings[key] for key in ("eps_clip_higher", "c_clip") if key in settings}
    if name == "sequence":
        more["importance_sampling_level"] = "sequence"
    if rejection:
        more["rejection_sampling"] = types.SimpleNamespace(**rejection)

    def peer(log_probs, mask, column):
        columns = column("proximal"), column("behaviour"), column("advantages")
        return areal.ppo_actor_loss_fn(log_probs, *columns, settings["eps_clip"], mask.bool(), **more)[0]

    own = {"loss": "ppo"} | ({} if rejection else {"correction": "none"}) | settings
    assert_equal(build_dir, own, token_mean_weights, peer)


def test_sapo_is_areals(build_dir):
    areal = areal_losses()

    def peer(log_probs, mask, column):
        columns = column("proximal"), column("advantages")
        return areal.sapo_loss_fn(log_probs, *columns, 1.5, 2.5, mask.bool())[0]

    # AReaL averages SAPO over tokens. The paper, and Bough by default, average over sequences.
    settings = {"loss": "sapo", "sapo_tau_pos": 1.5, "sapo_tau_neg": 2.5, "correction": "none"}
    assert_equal(build_dir, settings, token_mean_weights, peer)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("metric", "action"),
    [("ratio", "mask"), ("ratio", "clamp"), ("kl_k1", "mask"), ("kl_k2", "mask"), ("kl_k3", "mask")],
)
def test_rejection_sampling_is_areals(build_dir, action, level, metric):
    areal = areal_losses()
    areal.apply_rejection_sampling.__globals__["RejectionSamplingResult"] = types.SimpleNamespace
    lower, upper = {"ratio": (0.9, 1.1), "kl_k1": (-0.1, 0.1)}.get(metric, (None, 0.01))
    # AReaL computes k3 of 1 / w (test_k3_differs_from_areal_in_its_direction), which is Bough's k3 of -log w.
    # The weight then has the opposite sign of log w, so only the decisions are compared.
    sign = -1.0 if metric == "kl_k3" else 1.0
    batches = list(random_log_ws())
    for how in ("sum", "mean", "max") if level == "sequence" else ("mean",):
        rule = {
            "action": action,
            "level": level,
            "metric": metric,
            "agg": how,
            "upper": upper,
            "lower": lower,
        }
        answers = factors_of(
            build_dir,
            [({"rejection_sampling": rule}, [sign * x for x in batch[0]], batch[1]) for batch in batches],
        )
        num_masked = 0
        for (_, _, log_w, mask), (factors, _) in zip(batches, answers, strict=True):
            result = areal.apply_rejection_sampling(
                log_w, torch.zeros_like(log_w), mask, None, types.SimpleNamespace(**rule)
            )
            expected = result.behave_imp_weight[mask.bool()].tolist()
            num_masked += sum(x == 0 for x in expected)
            if metric != "kl_k3":
                assert factors == pytest.approx(expected, abs=1e-6)  # AReaL's factors are fp32
            else:
                assert [f != 0 for f in factors] == [x != 0 for x in expected]
        assert num_masked > 0 or action == "clamp", "the bounds decide nothing"


def test_k3_differs_from_areal_in_its_direction(build_dir):
    """For samples from mu, k3 is w - 1 - log w with w = pi_old / mu. Its mean is KL(mu, pi_old), as in verl.
    AReaL's code passes the two policies to its estimator in the opposite order and gets 1/w - 1 + log w. The
    mean of that under mu is no divergence."""
    areal = functions("areal", "areal/utils/data.py", ["KLEstimator"])
    log_w = torch.tensor([0.5])
    theirs = areal.KLEstimator._compute_approx_kl(log_w, torch.zeros(1), "k3", apply_clamp=False).item()
    assert theirs == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    ours = math.exp(0.5) - 1 - 0.5
    rules = [{"metric": "kl_k3", "upper": bound} for bound in (ours - 1e-3, ours + 1e-3)]
    below, above = factors_of(build_dir, [({"rejection_sampling": rule}, [0.5], [0]) for rule in rules])
    assert below[0] == [0.0] and above[0] == pytest.approx([math.exp(0.5)])


def test_clamping_by_a_divergence_is_refused_unlike_areal(build_dir):
    """AReaL clamps a weight to the bounds of the KL that it judges, though these are numbers of another kind.
    In Bough only a ratio can be clamped."""
    rule = {"metric": "kl_k2", "action": "clamp", "upper": 0.01}
    request = {"actor": json.dumps({"rejection_sampling": rule}), "kl": []}
    [answer] = run_tool(build_dir, [request])
    assert "rejection_sampling.action" in answer["error"]


def test_m2po_is_areals(build_dir):
    names = ["_apply_m2po_masking", "_get_m2po_loss_mask"]
    areal = functions("areal", "areal/trainer/ppo/actor.py", names)
    batches = [(threshold, *batch) for threshold in (1e-6, 0.001, 0.02, 10.0) for batch in random_log_ws()]
    settings = {"correction": "tis", "correction_upper": 1e9}
    answers = factors_of(build_dir, [(settings | {"m2_threshold": b[0]}, b[1], b[2]) for b in batches])
    for (threshold, plain, _, log_w, mask), (factors, _) in zip(batches, answers, strict=True):
        kept = areal._apply_m2po_masking(torch.zeros_like(log_w), log_w, mask.bool(), threshold)
        kept = kept[mask.bool()].tolist()
        ours = [f != 0 for f in factors]
        # If no token is near enough, AReaL still keeps one token, whatever its ratio. Bough keeps none.
        if any(ours):
            assert ours == kept
        else:
            assert sum(kept) <= 1 and min(x * x for x in plain) >= threshold


def trl_loss():
    """GRPOTrainer._compute_loss up to the line that computes the loss, without metrics."""
    tree = parsed("trl", "trl/trainer/grpo_trainer.py")
    [trainer] = [node for node in tree.body if getattr(node, "name", None) == "GRPOTrainer"]
    named = {node.name: node for node in trainer.body if isinstance(node, ast.FunctionDef)}
    loss = named["_compute_loss"]
    ends = [i for i, node in enumerate(loss.body) if "Unknown loss type" in ast.unparse(node)]
    assert len(ends) == 2, "one raise for the terms, one for the aggregation"
    loss.body = loss.body[: ends[1] + 1] + ast.parse("return loss").body
    return compiled([loss, named["get_off_policy_mask"]], "grpo_trainer.py", {})


TRL_LOSSES = {
    "grpo": ({"loss": "ppo", "loss_aggregation": "sequence_mean"}, {}),
    "dapo": ({"loss": "ppo"}, {"loss_type": "dapo"}),
    "two-sided delta": ({"loss": "ppo", "c_clip": 1.4}, {"loss_type": "dapo", "delta": 1.4}),
    "gspo": ({"loss": "gspo"}, {"importance_sampling_level": "sequence"}),
    "cispo": ({"loss": "cispo", "eps_clip": 1.0, "eps_clip_higher": 0.2}, {"loss_type": "cispo", "cap": 1.2}),
    "sapo": ({"loss": "sapo", "sapo_tau_pos": 1.5, "sapo_tau_neg": 2.5}, {"loss_type": "sapo"}),
    "unbiased KL": (
        {"loss": "ppo", "kl_loss_coef": 0.3, "kl_loss_type": "unbiased"},
        {"loss_type": "dapo", "beta": 0.3},
    ),
    "off-policy mask": (
        {"loss": "ppo", "off_policy_mask_threshold": 0.02},
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
    ),
}


@pytest.mark.parametrize("name", TRL_LOSSES)
def test_losses_are_trls(build_dir, name):
    settings, theirs = TRL_LOSSES[name]
    trl = trl_loss()
    trainer = types.SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=0.1,
        epsilon_high=theirs.get("cap", 0.2),
        loss_type="grpo",
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=types.SimpleNamespace(training=False),
        accelerator=types.SimpleNamespace(num_processes=1),
        args=types.SimpleNamespace(
            delta=theirs.get("delta"),
            use_bias_correction_kl=True,
            sapo_temperature_pos=1.5,
            sapo_temperature_neg=2.5,
        ),
        get_off_policy_mask=trl.get_off_policy_mask,
    )
    vars(trainer).update({key: value for key, value in theirs.items() if key not in ("cap", "delta")})

    def peer(log_probs, mask, column):
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, None, None)
        empty = torch.zeros(len(mask), 0, dtype=torch.long)
        inputs = {
            "prompt_ids": empty,
            "prompt_mask": empty,
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": column("advantages"),
            "old_per_token_logps": column("proximal"),
            "ref_per_token_logps": column("reference"),
            "sampling_per_token_logps": column("behaviour"),
            "num_items_in_batch": mask.sum(),
        }
        return trl._compute_loss(trainer, None, inputs)

    own = {"correction": "none", "eps_clip": 0.1, "eps_clip_higher": 0.2} | settings
    own.pop("loss_aggregation", None)
    if settings["loss"] == "sapo":
        del own["eps_clip"], own["eps_clip_higher"]
    by_sequence = name in ("grpo", "gspo", "sapo")
    assert_equal(build_dir, own, sequence_mean_weights if by_sequence else token_mean_weights, peer)
