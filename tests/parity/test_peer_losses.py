"""Losses, KL estimators and controllers against the peers' own code, taken function by function out of their
wheels, so that none of their dependencies is needed. The wheels (areal 1.0.4, verl 0.9.1, fetched with
`pip download --no-deps`) are looked for in the folder BOUGH_PEER_WHEELS; without it these tests skip."""

import ast
import json
import os
import types
import zipfile
from pathlib import Path

import pytest
import torch
from test_algorithms import random_rows, request_of, run_tool

FOLDER = os.environ.get("BOUGH_PEER_WHEELS", "")


def functions(wheel, path, names, **namespace):
    """Functions and classes of one file of a wheel, without its imports, decorators and annotations."""
    found = sorted(Path(FOLDER).glob(f"{wheel}-*.whl")) if FOLDER else []
    if not found:
        pytest.skip(f"no {wheel} wheel in BOUGH_PEER_WHEELS")
    with zipfile.ZipFile(found[-1]) as archive:
        tree = ast.parse(archive.read(path))
    chosen = [node for node in tree.body if getattr(node, "name", None) in names]
    assert {node.name for node in chosen} == set(names), path
    for node in chosen:
        node.decorator_list = []
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef):
                inner.returns = None
                for argument in inner.args.args + inner.args.kwonlyargs:
                    argument.annotation = None
    scope = {"torch": torch, **namespace}
    exec(compile(ast.Module(chosen, []), path, "exec"), scope)
    return types.SimpleNamespace(**{name: scope[name] for name in names})


class Config(dict):
    """What verl's losses read of their settings."""

    __getattr__ = dict.get


def padded(rows, name):
    """[sequences, longest] and the mask."""
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


def assert_equal(build_dir, settings, weights, peer):
    """`peer`: log_probs, mask and a way to other columns, all padded, to the loss."""
    for seed in range(6):
        rows = random_rows(seed) | {"version": 4}
        rows["weights"] = weights(rows)
        [answer] = run_tool(build_dir, [request_of(settings, rows, False)])
        assert "error" not in answer, answer
        log_probs, mask = padded(rows, "log_probs")
        log_probs.requires_grad_(True)
        loss = peer(log_probs, mask, lambda name, rows=rows: padded(rows, name)[0])
        loss.backward()
        # verl adds 1e-8 to the number of a sequence's tokens.
        assert answer["loss"] == pytest.approx(loss.item(), abs=1e-7)
        assert answer["d_log_probs"] == pytest.approx(log_probs.grad[mask.bool()].tolist(), abs=1e-7)


VERL = "verl/trainer/ppo/core_algos.py"
VERL_LOSSES = {
    "vanilla": ({"loss": "ppo", "eps_clip": 0.1, "eps_clip_higher": 0.2, "c_clip": 3.0}, "token-mean"),
    "gspo": ({"loss": "gspo_token", "eps_clip": 0.02, "eps_clip_higher": 0.04}, "seq-mean-token-mean"),
    "cispo": ({"loss": "cispo", "eps_clip": 0.1, "eps_clip_higher": 0.2}, "token-mean"),
    "geo_mean": ({"loss": "gmpo", "eps_clip": 0.05, "eps_clip_higher": 0.1}, "seq-mean-token-mean"),
}


@pytest.mark.parametrize("name", VERL_LOSSES)
def test_losses_are_verls(build_dir, name):
    settings, how = VERL_LOSSES[name]
    masked = functions("verl", "verl/utils/torch_functional.py", ["masked_sum", "masked_mean"])
    loss_name = f"compute_policy_loss_{name}"
    verl = functions(
        "verl",
        VERL,
        ["agg_loss", loss_name],
        verl_F=masked,
        ActorConfig=Config,
        AlgoConfig=types.SimpleNamespace,
        Any=None,
    )
    config = Config(
        clip_ratio=0.2,
        clip_ratio_low=settings["eps_clip"],
        clip_ratio_high=settings["eps_clip_higher"],
        clip_ratio_c=3.0,
        global_batch_info={},
    )

    def peer(log_probs, mask, column):
        arguments = (column("proximal"), log_probs, column("advantages"), mask)
        return getattr(verl, loss_name)(*arguments, loss_agg_mode=how, config=config)[0]

    weights = token_mean_weights if how == "token-mean" else sequence_mean_weights
    # verl has no weight of its own against mu here.
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
            # verl's k3 is cut at 10, which these rows stay below: the tail is what keeps a policy near.
            assert answer["metrics"]["loss/kl"] == pytest.approx(expected.item(), abs=1e-10)
    controller = verl.AdaptiveKLController(0.1, 0.05, 1000)
    steps = [{"kl": 0.01 * i, "sequences": 32, "entropy": 0} for i in range(12)]
    settings = {"kl_ctl": 0.1, "kl_ctrl": {"type": "adaptive", "target_kl": 0.05, "horizon": 1000}}
    [answer] = run_tool(build_dir, [{"actor": json.dumps(settings), "kl": steps}])
    for step, got in zip(steps, answer["kl_ctl"], strict=True):
        controller.update(step["kl"], step["sequences"])
        assert got == pytest.approx(controller.value, rel=1e-12)


AREAL_LOSSES = {
    "ppo": {"eps_clip": 0.1},
    "higher": {"eps_clip": 0.1, "eps_clip_higher": 0.2},
    "dual": {"eps_clip": 0.1, "c_clip": 1.5},
}


@pytest.mark.parametrize("name", AREAL_LOSSES)
def test_ppo_is_areals(build_dir, name):
    settings = AREAL_LOSSES[name]
    areal = functions("areal", "areal/utils/functional/functional.py", ["ppo_actor_loss_fn"])

    def peer(log_probs, mask, column):
        more = {key: value for key, value in settings.items() if key != "eps_clip"}
        columns = column("proximal"), column("behaviour"), column("advantages")
        return areal.ppo_actor_loss_fn(log_probs, *columns, settings["eps_clip"], mask.bool(), **more)[0]

    assert_equal(build_dir, {"loss": "ppo", "correction": "none"} | settings, token_mean_weights, peer)
