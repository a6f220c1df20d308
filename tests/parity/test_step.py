"""`bough step` against transformers, which runs each sequence by itself: loss and every gradient."""

import json
from pathlib import Path

import pytest
import torch
from rollout_files import (
    compute_in_double,
    flat_gradients,
    gradient_error,
    log_probs,
    random_rollouts,
    router_losses,
    split_experts,
    write_rollouts,
)
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, make_tiny_model
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
NUM_TREES = len(ARCHITECTURES)


def step(bough, model, rollouts, *arguments, grads=None):
    """Returns the JSON of `bough step` and, if `grads` is given, the gradients by name."""
    if grads is not None:
        arguments = (*arguments, "--grads", grads)
    fixed = ("--model", model, "--rollouts", rollouts, "--json", "--threads", 1)
    result = bough("step", *fixed, *arguments, ok=True)
    return result.json, load_file(grads) if grads is not None else None


@pytest.mark.parametrize("seed", range(NUM_TREES))
def test_gradients_in_fp64(bough, tiny_models, tmp_path, monkeypatch, seed):
    compute_in_double(monkeypatch)
    architecture = list(ARCHITECTURES)[seed]
    loss = "grpo" if seed % 3 == 2 else "pg"
    directory = tiny_models(architecture)
    # The eager attention computes its softmax in fp32.
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="sdpa")
    rollouts = random_rollouts(seed, model.config.vocab_size)
    expected_loss, expected, norms = flat_gradients(model, rollouts, loss)
    path = write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    passes = (
        ("dense", 1024, "false"),
        ("path", 1024, "true"),
        ("path", 1 + seed % 7, "null"),
        ("dense", 5, "true"),
    )
    for mode, max_tokens, again in passes:
        report, got = step(
            bough, directory, path, "--dtype", "fp64", "--mode", mode, "--max-tokens-per-mb", max_tokens,
            "--loss", loss, f"actor.gradient_checkpointing={again}", grads=tmp_path / "grads.safetensors",
        )  # fmt: skip
        assert report["loss"] == pytest.approx(expected_loss, rel=1e-9, abs=1e-12)
        assert got.keys() == expected.keys()
        for name, gradient in got.items():
            assert gradient.dtype == torch.float64 and gradient.shape == expected[name].shape
            error = gradient_error(gradient, expected[name], norms[name])
            assert error <= 1e-9, (architecture, mode, max_tokens, name, error)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "olmoe_clip"])
def test_gradients_of_mixtures_in_fp32(bough, tiny_models, tmp_path, monkeypatch, architecture):
    directory = tiny_models(architecture)
    rollouts = random_rollouts(5, 311)

    def load(dtype):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")

    with monkeypatch.context() as patch:
        compute_in_double(patch)
        expected_loss, expected, norms = flat_gradients(load(torch.float64), rollouts, "pg")
    _, in_fp32, _ = flat_gradients(load(torch.float32), rollouts, "pg")
    report, got = step(
        bough, directory, write_rollouts(tmp_path / "r.jsonl", rollouts), grads=tmp_path / "g.safetensors"
    )
    assert report["loss"] == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in got.items():
        error, theirs = (
            gradient_error(g.double(), expected[name], norms[name]) for g in (gradient, in_fp32[name])
        )
        assert error <= max(1e-5, 5 * theirs), (name, error, theirs)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe_steps", "olmoe_clip"])
def test_losses_of_routers_in_fp64(bough, tiny_models, tmp_path, monkeypatch, architecture):
    """The load-balancing loss of transformers, over all sequences, and the z-loss by its formula."""
    compute_in_double(monkeypatch)
    directory = tiny_models(architecture)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="sdpa")
    rollouts = random_rollouts(5, model.config.vocab_size)
    aux, z = router_losses(model, rollouts)
    model.zero_grad()
    (0.7 * aux + 0.3 * z).backward()
    own = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    own = split_experts(model, own)
    _, policy, _ = flat_gradients(model, rollouts, "pg")
    path = write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    largest = max(gradient.norm().item() for gradient in own.values())
    for mode, max_tokens in (("dense", 1024), ("blocks", 16), ("path", 5)):
        _, got = step(
            bough, directory, path, "--dtype", "fp64", "--mode", mode, "--max-tokens-per-mb", max_tokens,
            "actor.router_aux_loss_coef=0.7", "actor.router_z_loss_coef=0.3",
            grads=tmp_path / "grads.safetensors",
        )  # fmt: skip
        for name, gradient in got.items():
            expected = policy[name] + own[name]
            scale = max(expected.norm().item(), 1e-6 * largest)
            error = (gradient - expected).norm().item() / scale
            assert error <= 1e-9, (architecture, mode, name, error)
    assert own["model.embed_tokens.weight"].norm() > 1e-3 * largest > 0


def test_rewards_become_group_advantages(bough, tiny_models, tmp_path):
    rollouts = random_rollouts(3, 311) + random_rollouts(4, 311) + random_rollouts(5, 311)
    rewards = [0.25 * (i % 3) for i in range(len(rollouts))]
    for rollout, reward in zip(rollouts, rewards, strict=True):
        del rollout["advantage"]
        rollout["reward"] = reward
    directory = tiny_models("qwen3")
    path = write_rollouts(tmp_path / "a.jsonl", rollouts)
    from_rewards, _ = step(bough, directory, path, "--dtype", "fp64")
    for rollout in rollouts:
        mine = [r for r, other in zip(rewards, rollouts, strict=True) if other["group"] == rollout["group"]]
        mean = sum(mine) / len(mine)
        std = (sum((r - mean) ** 2 for r in mine) / (len(mine) - 1)) ** 0.5
        rollout["advantage"] = (rollout["reward"] - mean) / (std + 1e-6)
    given, _ = step(bough, directory, write_rollouts(tmp_path / "b.jsonl", rollouts), "--dtype", "fp64")
    # A rollout file's advantage is an fp32 number.
    assert from_rewards["loss"] == pytest.approx(given["loss"], rel=1e-6)
    assert abs(given["loss"]) > 1e-3


def test_settings_of_a_run(bough, tiny_models, tmp_path):
    """Loss, advantages and aggregation are given as key=value, as for a run. The options are short forms."""
    rollouts = random_rollouts(3, 311) + random_rollouts(4, 311)
    for i, rollout in enumerate(rollouts):
        rollout |= {"reward": 0.25 * (i % 3), "advantage": 1.0 + i}
    path = write_rollouts(tmp_path / "r.jsonl", rollouts)

    def loss(*arguments):
        return step(bough, tiny_models("qwen3"), path, "--dtype", "fp64", *arguments)[0]["loss"]

    default = loss()
    assert loss("actor.loss_aggregation=token_mean") == default
    assert loss("--loss", "grpo") == loss("actor.loss=grpo")
    aggregations = {
        loss(f"actor.loss_aggregation={how}", "actor.loss_constant_length=9")
        for how in ("token_mean", "sequence_mean", "constant_length", "group_mean")
    }
    assert len(aggregations) >= 3
    assert loss("actor.adv_estimator=dr_grpo") == default, "the file's own advantages win"
    estimators = {loss("--from-rewards", f"actor.adv_estimator={name}") for name in ("grpo", "dr_grpo")}
    assert len(estimators) == 2 and default not in estimators
    assert loss("actor.loss=ppo", "actor.use_decoupled_loss=true") != loss("actor.loss=ppo")


def test_temperature_divides_the_logits(bough, tiny_models, tmp_path):
    directory = tiny_models("qwen3")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = [5, 6, 7, 200, 9]
    rollout = {"input_ids": ids, "loss_mask": [0, 1, 1, 1, 1], "logprobs": [0, -1, -1, -1, -1]}
    rollout["advantage"] = 1.0
    for temperature in (0.7, 1.3):
        path = write_rollouts(tmp_path / "rollouts.jsonl", [rollout | {"temperature": temperature}])
        report, _ = step(bough, directory, path)
        with torch.no_grad():
            expected = -log_probs(model, ids, temperature).mean().item()
        assert report["loss"] == pytest.approx(expected, abs=1e-5)


def test_nested_prefixes(bough, tiny_models, tmp_path):
    """1,100 sequences, each a prefix of the next: the tree is one chain with an end at every token."""
    draw = torch.Generator().manual_seed(0)
    chain = torch.randint(311, (1100,), generator=draw).tolist()
    rollouts = [
        {"input_ids": chain[:n], "loss_mask": [0] * (n - 1) + [1], "logprobs": [0.0] * n, "advantage": 1.0}
        for n in range(1, len(chain) + 1)
    ]
    directory = tiny_models("qwen3")
    path = write_rollouts(tmp_path / "nested.jsonl", rollouts)
    report, got = step(bough, directory, path, "--mode", "path", grads=tmp_path / "g.safetensors")
    assert report["tokens"] == 1100 * 1101 // 2
    assert report["tree_tokens"] == 1100
    # Every token of the chain is trained once, by the sequence that ends there. The longest sequence alone,
    # with all its tokens trained, has the same loss.
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    loss = -log_probs(model, chain).mean()
    loss.backward()
    assert report["loss"] == pytest.approx(loss.item(), abs=1e-4)
    for name, parameter in model.named_parameters():
        assert gradient_error(got[name], parameter.grad, 0) < 1e-3, name


def test_no_trained_token(bough, tiny_models, tmp_path):
    rollouts = [{"input_ids": [1, 2, 3], "loss_mask": [1, 0, 0], "logprobs": [0, 0, 0], "advantage": 1.0},
                {"input_ids": [], "loss_mask": [], "logprobs": [], "advantage": 1.0}]  # fmt: skip
    for mode in ("dense", "path"):
        report, got = step(
            bough, tiny_models("llama"), write_rollouts(tmp_path / "r.jsonl", rollouts), "--mode", mode,
            grads=tmp_path / "g.safetensors",
        )  # fmt: skip
        assert report["loss"] == 0 and report["trained_tokens"] == 0
        assert all((gradient == 0).all() for gradient in got.values())


def test_gradients_in_bf16(bough, tmp_path):
    """Mean over 5 seeds: error against the fp32 flat batch at most 1.1 times that of transformers in bf16."""
    ours, theirs = [], []
    for seed in range(5):
        reference = make_tiny_model("qwen3", seed)
        directory = tmp_path / f"model{seed}"
        # bf16 represents these weights exactly, so that only the arithmetic is compared.
        reference.to(torch.bfloat16).save_pretrained(directory)
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        low = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        rollouts = random_rollouts(100 + seed, 311, longest_piece=48)
        _, expected, norms = flat_gradients(reference, rollouts, "pg")
        _, flat, _ = flat_gradients(low, rollouts, "pg")
        path = write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
        _, got = step(bough, directory, path, "--dtype", "bf16", grads=tmp_path / "g.safetensors")
        for name in expected:
            assert got[name].dtype == torch.float32
            ours.append(gradient_error(got[name], expected[name], norms[name]))
            theirs.append(gradient_error(flat[name].float(), expected[name], norms[name]))
    assert 0 < sum(ours) <= 1.1 * sum(theirs), (sum(ours) / len(ours), sum(theirs) / len(theirs))


def test_summary_and_json_have_the_expected_values(bough, tiny_models, tmp_path):
    path = write_rollouts(tmp_path / "rollouts.jsonl", random_rollouts(1, 311))
    report, _ = step(bough, tiny_models("qwen2"), path, "--repeat", 3)
    assert report["seconds_min"] <= report["seconds_per_step"] <= report["seconds_max"]
    assert report["compression"] == pytest.approx(report["tokens"] / report["tree_tokens"])
    assert (
        report["work_ratio"] >= 1
        and report["passes"] >= 1
        and report["mode"] in ("dense", "packed", "blocks")
    )
    readable = bough("step", "--model", tiny_models("qwen2"), "--rollouts", path, ok=True)
    for word in ("step", "loss", "compression", "passes", "peak memory"):
        assert word in readable.stdout
    plan = bough("plan", "--rollouts", path, "--json", "--html", tmp_path / "tree.html", ok=True)
    assert len(plan.stdout.splitlines()) == 1
    assert plan.json["tree_tokens"] == report["tree_tokens"]
    strategies = plan.json["strategies"]
    assert sorted(strategies) == ["auto", "blocks", "dense", "packed", "path"]
    assert strategies["path"]["tokens_forwarded"] <= plan.json["tree_tokens"]
    assert strategies["dense"]["tokens_forwarded"] <= plan.json["tokens"]
    assert strategies["auto"]["predicted_seconds"] == min(
        s["predicted_seconds"] for s in strategies.values() if "error" not in s
    )
    assert plan.json["chosen"] in strategies and len(plan.json["ranks"]) == 1
    assert '"tree_tokens":' in (tmp_path / "tree.html").read_text()


def test_layers_computed_again(bough, tiny_models, tmp_path):
    """Recomputed layers need less memory and give the same gradient. Bad settings are named."""
    prompt = [5] * 60
    rollouts = [
        {
            "group": "0",
            "input_ids": prompt + [10 + sample] * 50,
            "loss_mask": [0] * 60 + [1] * 50,
            "logprobs": [-1.0] * 110,
            "advantage": float(sample - 3),
        }
        for sample in range(8)
    ]
    directory = tiny_models("qwen3")
    path = write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    reports, gradients = {}, {}
    for again in ("true", "false"):
        reports[again], gradients[again] = step(
            bough, directory, path, f"actor.gradient_checkpointing={again}", grads=tmp_path / "g.safetensors"
        )
    assert reports["true"]["tokens_recomputed"] >= reports["true"]["tree_tokens"]
    assert reports["false"]["tokens_recomputed"] == 0
    assert reports["true"]["loss"] == pytest.approx(reports["false"]["loss"], abs=1e-5)
    for name, gradient in gradients["true"].items():
        assert gradient_error(gradient, gradients["false"][name], 0) < 1e-4, name

    def smallest(again):
        fixed = ("step", "--model", directory, "--rollouts", path, "--memory", "1KiB")
        message = bough(*fixed, f"actor.gradient_checkpointing={again}").stderr
        return int(message.split("the smallest budget that fits is ")[1].split()[0])

    least = smallest("null")
    assert least <= smallest("true") and least <= smallest("false")
    report, _ = step(bough, directory, path, "--memory", least)
    assert report["predicted_peak_bytes"] <= least
    message = bough(
        "step", "--model", directory, "--rollouts", path, "actor.gradient_checkpointing=often"
    ).stderr
    assert "actor.gradient_checkpointing" in message and "expected true or false" in message
    plan = ("plan", "--rollouts", path, "--model", directory)
    readable = bough(*plan, "--gradient-checkpointing", "true", ok=True).stdout
    assert "blocks recompute their layers in backward" in readable
    kept = bough(*plan, "--gradient-checkpointing", "false", "--json", ok=True).json["strategies"]["dense"]
    assert kept["tokens_recomputed"] == 0
    assert "expected true or false" in bough(*plan, "--gradient-checkpointing", "yes").stderr

    offload = "actor.activation_offload=true"
    message = bough("step", "--model", directory, "--rollouts", path, offload).stderr
    assert "actor.activation_offload: got true, expected a GPU" in message
    assert reports["true"]["blocks_on_host"] == 0
    assert "--activation-offload: got true" in bough(*plan, "--activation-offload", "true").stderr
    on_gpu = (*plan, "--device", "h100", "--gradient-checkpointing", "true", "--activation-offload")
    assert "with the layer inputs in host memory" in bough(*on_gpu, "true", ok=True).stdout
    here, there = (
        bough(*on_gpu, choice, "--json", ok=True).json["strategies"]["dense"] for choice in ("false", "true")
    )
    assert here["blocks_on_host"] == 0 and there["blocks_on_host"] == there["passes"]
    assert there["predicted_peak_bytes"] <= here["predicted_peak_bytes"]


def test_overlap_and_reuse_of_plans(bough, tiny_models, tmp_path):
    """POR and ERR, counted by hand: prompts of 4 tokens with answers of 3 and 2, and of 3, 2 and 1."""
    answers = {1: [[2, 2, 2], [3, 3]], 5: [[6, 6, 6], [7, 7], [8]]}
    rollouts = [
        {
            "group": str(prompt),
            "input_ids": [prompt] * 4 + answer,
            "loss_mask": [0] * 4 + [1] * len(answer),
            "logprobs": [0.0] * 4 + [-1.0] * len(answer),
            "advantage": 1.0,
        }
        for prompt, samples in answers.items()
        for answer in samples
    ]
    path, page = write_rollouts(tmp_path / "rollouts.jsonl", rollouts), tmp_path / "tree.html"
    options = ("--rollouts", path, "--device", "h100", "--max-tokens-per-mb", 18)

    def plan(packer):
        return bough("plan", *options, "--packer", packer, "--json", "--html", page, ok=True).json

    report = plan("auto")
    assert report["por"] == pytest.approx(1 - 19 / 31)
    errs = {name: strategy["err"] for name, strategy in report["strategies"].items()}
    assert errs["dense"] == 0
    assert errs["path"] == errs["blocks"] == pytest.approx(1 - 19 / 31)
    assert errs["packed"] == pytest.approx(1 - 19 / 31)
    # With the longest sequences first, the two prompts share a tree that has no room for the last sequence.
    assert plan("first_fit_decreasing")["strategies"]["packed"]["err"] == pytest.approx(1 - 23 / 31)
    assert "POR (potential overlap ratio) 38.7%" in page.read_text()
    assert "dense 0%, packed 25.8%, path 38.7%" in page.read_text()
    text = bough("plan", *options, "--packer", "first_fit_decreasing", ok=True).stdout
    assert "38.7%: potential overlap ratio" in text
    assert "25.8%" in next(line for line in text.splitlines() if line.startswith("packed"))
    assert "expected auto, heuristic" in bough("plan", *options, "--packer", "best").stderr
    # The loss is the same for every way to cut the batch into trees.
    model = tiny_models("qwen3")
    limits = ("--mode", "packed", "--max-tokens-per-mb", 10)
    losses = [
        step(bough, model, path, "--dtype", "fp64", *limits, f"actor.packer={packer}")[0]["loss"]
        for packer in ("auto", "heuristic", "first_fit_decreasing", "single_path", "exact")
    ]
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-12)


def test_memory_budget(bough, tiny_models, tmp_path):
    """A budget is kept, or refused with a number of bytes that is enough."""
    path = write_rollouts(tmp_path / "rollouts.jsonl", random_rollouts(7, 311, longest_piece=200))
    free, _ = step(bough, tiny_models("qwen3"), path)
    budget = int(0.6 * free["predicted_peak_bytes"])
    smaller, _ = step(bough, tiny_models("qwen3"), path, "--memory", budget)
    assert smaller["peak_bytes"] <= 1.1 * smaller["predicted_peak_bytes"]
    assert smaller["predicted_peak_bytes"] <= budget
    assert 0 < smaller["peak_bytes"] < free["peak_bytes"]
    assert smaller["loss"] == pytest.approx(free["loss"], rel=1e-4)
    refused = bough("step", "--model", tiny_models("qwen3"), "--rollouts", path, "--memory", "1KiB")
    assert refused.returncode == 2
    smallest = int(refused.stderr.split("that fits is ")[1].split()[0])
    report, _ = step(bough, tiny_models("qwen3"), path, "--memory", smallest)
    assert report["predicted_peak_bytes"] == smallest
    below = bough("step", "--model", tiny_models("qwen3"), "--rollouts", path, "--memory", smallest - 1)
    assert below.returncode == 2 and json.dumps(smallest) in below.stderr


def test_the_peers_that_bench_times_compute_the_same_step(bough, tmp_path, monkeypatch):
    """bench/peer_step.py: FlexAttention's packing of sequences and of trees, against dense and Bough."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    import peer_step
    import workload

    path = tmp_path / "rollouts.jsonl"
    workload.write_set(workload.QUICK_SETS["agentic"], path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    _, model = peer_step.make_model("tiny", torch.float32, 4096)
    model.save_pretrained(tmp_path / "model")
    report, _ = step(bough, tmp_path / "model", path, "--dtype", "fp32")
    gradients = {}
    for peer, run in {
        "dense": lambda: peer_step.step_dense(model, rows, False),
        "flex_packed": lambda: peer_step.step_flex(model, rows, 250, shares=False),
        "flex_tree": lambda: peer_step.step_flex(model, rows, 150, shares=True),
    }.items():
        model.zero_grad()
        assert run() == pytest.approx(report["loss"], rel=1e-5), peer
        gradients[peer] = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    for name, expected in gradients["dense"].items():
        for peer in ("flex_packed", "flex_tree"):
            assert (gradients[peer][name] - expected).norm() <= 1e-5 * expected.norm(), (peer, name)
    packs = peer_step.packs_of_trees(rows, 150)
    assert 1 < len(packs) < len(peer_step.packs_of_sequences(rows, 150))
    assert sum(len(pack) for pack in packs) == len(rows)
