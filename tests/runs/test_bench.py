"""The output of `bough bench`, not the speed of anything."""

import json
import random

import pytest

STRATEGIES = ["auto", "dense", "packed", "path", "blocks"]


@pytest.fixture
def rollouts(tmp_path):
    """Two groups of three samples, with prompts of 24 tokens and answers of 12 tokens."""
    draw = random.Random(1)
    path = tmp_path / "rollouts.jsonl"
    with path.open("w") as file:
        for group in range(2):
            prompt = [draw.randrange(300) for _ in range(24)]
            for sample in range(3):
                ids = prompt + [draw.randrange(300) for _ in range(12)]
                mask = [0] * 24 + [1] * 12
                rollout = {"group": str(group), "input_ids": ids, "loss_mask": mask}
                rollout |= {"logprobs": [-1.0 * trained for trained in mask], "advantage": sample - 1.0}
                file.write(json.dumps(rollout) + "\n")
    return path


def test_every_strategy_stands_beside_the_bound(bough, tiny_models, rollouts):
    options = ("--model", tiny_models("qwen3"), "--rollouts", rollouts, "--repeat", 2, "--threads", 1)
    report = bough("bench", "step", *options, "--json", ok=True).json
    assert report["tokens"] == 216
    # The tree has two prompts and six answers. First tokens of answers may be equal.
    assert report["tree_tokens"] <= 2 * 24 + 6 * 12
    assert 1 < report["work_ratio"] < report["compression"] * 1.01
    assert report["bound_seconds"] == pytest.approx(
        report["flops"] / report["matrix_product_flops_per_second"]
    )
    assert report["dense_bound_seconds"] == pytest.approx(report["bound_seconds"] * report["work_ratio"])
    assert list(report["strategies"]) == sorted(STRATEGIES)
    for strategy in report["strategies"].values():
        assert strategy["seconds_per_step"] > 0
        assert strategy["bound_fraction"] == pytest.approx(
            report["bound_seconds"] / strategy["seconds_per_step"]
        )
        assert strategy["tokens_per_second"] == pytest.approx(216 / strategy["seconds_per_step"])
        assert strategy["peak_bytes"] > 0
    assert report["ops_of"] == "auto"
    assert sum(report["ops"].values()) == pytest.approx(1, abs=0.01)
    assert {"matrix products", "tree attention", "swiglu", "log prob", "between ops"} <= report["ops"].keys()

    text = bough("bench", "step", *options, "--modes", "path", "dense", ok=True).stdout
    assert "lower bound" in text and "% of the bound" in text and "x dense" in text
    assert "time of path by op:" in text and "matrix products" in text


def test_a_strategy_that_cannot_be_had_says_why(bough, tiny_models, rollouts):
    report = bough(
        "bench", "step", "--model", tiny_models("qwen3"), "--rollouts", rollouts, "--repeat", 1,
        "--modes", "path", "packed", "--max-tokens-per-mb", 20, "--json", ok=True,
    ).json  # fmt: skip
    assert "36 tokens" in report["strategies"]["packed"]["error"]
    assert report["strategies"]["path"]["seconds_per_step"] > 0


def test_generation_stands_beside_the_bound(bough, tiny_models):
    options = ("--model", tiny_models("qwen3"), "--repeat", 2, "--threads", 1, "--prompts", 3)
    options += ("--n-samples", 2, "--prompt-tokens", 20, "--max-new-tokens", 5, "--max-concurrent", 4)
    report = bough("bench", "rollout", *options, "--json", ok=True).json
    assert report["samples"] == 6 and report["new_tokens"] == 30
    assert report["prefill_tokens"] + report["cached_tokens"] >= 3 * 20
    assert report["new_tokens_per_second"] == pytest.approx(30 / report["seconds"])
    assert report["bound_fraction"] == pytest.approx(report["bound_seconds"] / report["seconds"])
    assert report["bound_seconds"] > 0 and 0 <= report["bound_memory_share"] <= 1
    # Six samples in four slots take two rounds. Each round has at most one pass of prompts, and four decoding
    # passes.
    assert 0 < report["occupancy"] <= 1
    assert report["passes"] >= 8

    text = bough("bench", "rollout", *options, ok=True).stdout
    assert "lower bound" in text and "slots decoding" in text and "from the cache" in text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["bench"], "expected step, rollout, serve or profile"),
        (["bench", "rollout", "--model", "m", "--prompts", "0"], "--prompts: got 0"),
        (["bench", "rollout", "--model", "m", "--kv-memory", "much"], "--kv-memory"),
        (["bench", "stop"], "unexpected argument 'stop'"),
        (["bench", "step"], "--model"),
        (["bench", "step", "--model", "m", "--rollouts", "r", "--modes", "fast"], "--modes: got 'fast'"),
        (["bench", "step", "--model", "m", "--rollouts", "r", "--repeat", "0"], "--repeat: got 0"),
    ],
)
def test_bad_use_is_named(bough, arguments, words):
    result = bough(*arguments)
    assert result.returncode == 2, result
    assert words in result.stderr.replace('"', "'"), result


def test_serve_stands_beside_its_engine(bough, tiny_models):
    options = ("--model", tiny_models("qwen3"), "--requests", 6, "--max-new-tokens", 5, "--threads", 1)
    report = bough(
        "bench", "serve", *options, "--repeat", 1, "rollout.kv_memory=16MiB", "--json", ok=True
    ).json
    assert report["served_tokens_per_s"] == pytest.approx(
        report["served_over_engine"] * report["engine_tokens_per_s"]
    )
    assert report["served_last_first_token_seconds"] > 0
