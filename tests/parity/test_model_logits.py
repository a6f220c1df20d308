"""Logits and log-probabilities of random models in fp32 against transformers, at every position, to 1e-4.
Models that `bough init` writes are loaded by transformers."""

import json
import os
import random
import shutil
import subprocess

import pytest
import torch
from rollout_files import compute_in_double, log_probs
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, MODEL_TYPES, write_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def logits(build_dir, tmp_path):
    """`logits(directory, dtype, sequences)` returns the model's logits, one tensor [T, V] for each
    sequence."""
    program = build_dir / "bin" / "logits_tool"
    if not os.access(program, os.X_OK):
        pytest.fail(f"{program} is not built: run `make build`")

    def get(directory, dtype, sequences):
        out = tmp_path / "logits.safetensors"
        lines = "".join(" ".join(map(str, ids)) + "\n" for ids in sequences)
        command = [program, directory, dtype, out]
        done = subprocess.run(command, input=lines, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        tensors = load_file(out)
        return [tensors[str(i)] for i in range(len(sequences))]

    return get


def random_sequences(seed: int, vocab: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in (1, 2, 17, 64, 300)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_in_fp32(logits, tiny_models, architecture):
    def load(dtype):
        return AutoModelForCausalLM.from_pretrained(tiny_models(architecture), dtype=dtype)

    model, model_fp64 = load(torch.float32), load(torch.float64)
    sequences = random_sequences(1, model.config.vocab_size)
    for ids, ours in zip(sequences, logits(tiny_models(architecture), "fp32", sequences), strict=True):
        with torch.no_grad():
            theirs = model(torch.tensor([ids])).logits[0]
            exact = model_fp64(torch.tensor([ids])).logits[0]
        assert ours.shape == exact.shape
        # The logits vary enough that a shuffled vocabulary or a wrong position could not pass.
        assert exact.std() > 0.5
        # Two computations in fp32 differ by the errors of both, which is near the limit at 300 tokens.
        their_error = (theirs - exact).abs().max()
        assert (ours - exact).abs().max() < max(1e-4, 2 * their_error)
        assert (ours - exact).norm() < 1e-5 * exact.norm()
        assert their_error < 1e-3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_in_fp64(logits, tiny_models, monkeypatch, architecture):
    compute_in_double(monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_models(architecture), dtype=torch.float64, attn_implementation="sdpa"
    )
    sequences = random_sequences(2, model.config.vocab_size)
    for ids, ours in zip(sequences, logits(tiny_models(architecture), "fp64", sequences), strict=True):
        with torch.no_grad():
            assert (ours - model(torch.tensor([ids])).logits[0]).abs().max() < 1e-10


def test_older_keys_of_gemma3(logits, tiny_models, tmp_path):
    """Files before transformers 5 have other keys in place of rope_parameters and layer_types."""
    directory = shutil.copytree(tiny_models("gemma3"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    del config["rope_parameters"], config["layer_types"]
    config |= {
        "rope_theta": 2e5,
        "rope_local_base_freq": 3e3,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    (ids,) = random_sequences(2, model.config.vocab_size)[3:4]
    (ours,) = logits(directory, "fp32", [ids])
    with torch.no_grad():
        torch.testing.assert_close(ours, model(torch.tensor([ids])).logits[0], rtol=1e-4, atol=1e-4)


def test_far_positions(logits, tmp_path):
    """Rotary angles of thousands of radians, where fp32 has few digits left for them."""
    write_tiny_model(tmp_path / "model", "llama", max_position_embeddings=8192, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = random.Random(5).choices(range(311), k=5000)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    (ours,) = logits(tmp_path / "model", "fp32", [ids])
    assert (ours - theirs).abs().max() < 1e-3  # angles differ in their last fp32 digit: 5,000 x 6e-8


# Settings that change the computation beyond a length, and that length in tests/tiny_models.py. Up to that
# length the logits are exact.
@pytest.mark.parametrize(
    ("architecture", "longest", "why"),
    [
        ("mistral", 512, "sliding_window"),
        ("gemma3", 512, "sliding_window"),
        ("phi3_longrope", 400, "rope_parameters"),
        ("llama_dynamic", 2048, "rope_parameters"),
    ],
)
def test_length_of_an_exact_model(bough, logits, tiny_models, tmp_path, architecture, longest, why):
    directory = tiny_models(architecture)
    ids = random.Random(5).choices(range(311), k=longest)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    (ours,) = logits(directory, "fp32", [ids])
    assert (ours - theirs).abs().max() < 1e-3  # angles of thousands of radians, as in test_far_positions

    def rollout(count):
        line = {"input_ids": (ids * 2)[:count], "loss_mask": [0] + [1] * (count - 1), "advantage": 1.0}
        (tmp_path / "r.jsonl").write_text(json.dumps(line | {"logprobs": [0.0] * count}) + "\n")
        return bough("step", "--model", directory, "--rollouts", "r.jsonl", "--json")

    assert rollout(longest).returncode == 0
    refused = rollout(longest + 1)
    assert refused.returncode == 2
    assert why in refused.stderr and str(longest) in refused.stderr and str(longest + 1) in refused.stderr
    # A sample ends at that length. A prompt of that length is refused.
    prompts = [ids[: longest - 3], ids]
    results = []
    for prompt in prompts:
        (tmp_path / "p.jsonl").write_text(json.dumps({"input_ids": prompt}) + "\n")
        results.append(
            bough("rollout", "--model", directory, "--prompts", "p.jsonl", "--out", "o.jsonl",
                  "--max-new-tokens", 20, "--min-new-tokens", 10)
        )  # fmt: skip
        if results[-1].returncode == 0:
            assert len(json.loads((tmp_path / "o.jsonl").read_text())["input_ids"]) == longest
    assert [result.returncode for result in results] == [0, 2]
    if longest < 2048:
        assert why in results[1].stderr


@pytest.mark.parametrize(
    ("architecture", "temperature"),
    [("qwen3", 0.7), ("qwen3", 1.0), ("qwen3", 1.3), ("gemma3", 1.0), ("olmo2", 1.0), ("phi3_longrope", 1.0)],
)
def test_rollout_log_probs(bough, tiny_models, tmp_path, architecture, temperature):
    """`bough rollout` writes the log-probabilities that transformers and `bough step` give the sampled
    tokens."""
    directory = tiny_models(architecture)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = "".join(json.dumps({"input_ids": [7, 8, 9, 100 + i]}) + "\n" for i in range(3))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    report = bough(
        "rollout", "--model", directory, "--prompts", "prompts.jsonl", "--out", "out.jsonl", "--n-samples", 4,
        "--max-new-tokens", 40, "--min-new-tokens", 10, "--temperature", temperature, "--top-p", 0.9,
        "--seed", 3, "--json", ok=True,
    )  # fmt: skip
    rollouts = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rollouts) == 12
    assert report.json["new_tokens"] == sum(sum(r["loss_mask"]) for r in rollouts)
    assert 0 < report.json["engine_seconds"] <= report.json["seconds"]
    # A random Gemma is certain of most tokens, because its lm_head is its embedding, which it scales.
    assert len({tuple(r["input_ids"]) for r in rollouts}) >= (4 if architecture == "gemma3" else 12)
    for rollout in rollouts:
        ids, start = rollout["input_ids"], rollout["loss_mask"].index(1)
        assert len(ids) - start >= 10
        with torch.no_grad():
            expected = log_probs(model, ids, temperature)
            raw = log_probs(model, ids)
        got = torch.tensor(rollout["logprobs"])
        assert (got[start:] - expected[start - 1 :]).abs().max() < 1e-4
        assert (got[:start] == 0).all()
        assert (torch.tensor(rollout["raw_logprobs"]) - raw[start - 1 :]).abs().max() < 1e-4
    # The trainer's log-probabilities: with advantage 1 the loss is the mean of minus log-probabilities.
    with open(tmp_path / "train.jsonl", "w") as file:
        file.writelines(json.dumps(rollout | {"advantage": 1.0}) + "\n" for rollout in rollouts)
    step = bough("step", "--model", directory, "--rollouts", "train.jsonl", "--json", ok=True)
    flat = [lp for r in rollouts for lp, m in zip(r["logprobs"], r["loss_mask"], strict=True) if m]
    assert step.json["loss"] == pytest.approx(-sum(flat) / len(flat), abs=1e-4)


@pytest.mark.parametrize("arch", MODEL_TYPES)
def test_init_is_loaded_by_transformers(bough, logits, tmp_path, arch):
    shape = ("--hidden-size", 48, "--layers", 2, "--heads", 6, "--kv-heads", 2, "--intermediate-size", 80)
    made = bough("init", "model", "--arch", arch, *shape, "--vocab-size", 300, "--seed", 7, "--json", ok=True)
    model, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    assert model.config.model_type == arch
    assert sum(p.numel() for p in model.parameters()) == made.json["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "Hello, wörld 12\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    (ours,) = logits(tmp_path / "model", "fp32", [ids])
    assert (ours - theirs).abs().max() < 1e-5
    # The weights are a function of the seed.
    weights = load_file(tmp_path / "model" / "model.safetensors")
    bough("init", "same", "--arch", arch, *shape, "--vocab-size", 300, "--seed", 7, ok=True)
    bough("init", "other", "--arch", arch, *shape, "--vocab-size", 300, "--seed", 8, ok=True)
    same, other = (load_file(tmp_path / name / "model.safetensors") for name in ("same", "other"))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not torch.equal(weights["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_init_tied_in_bf16(bough, tmp_path):
    bough("init", "model", "--tie", "--dtype", "bf16", "--head-dim", 64, ok=True)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.head_dim == 64


def test_init_keeps_what_is_there(bough, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    refused = bough("init", "model")
    assert refused.returncode == 2 and "--force" in refused.stderr
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["notes.txt"]
    bough("init", "model", "--force", ok=True)
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
