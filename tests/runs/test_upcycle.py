"""bough upcycle: a mixture of experts from a dense model."""

import json

import pytest
import torch
from run_util import ENVIRONMENT
from transformers import AutoModelForCausalLM

SHAPE = ("--hidden-size", 32, "--layers", 2, "--heads", 4, "--kv-heads", 2, "--intermediate-size", 48)


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([[3, 17, 5, 9, 30, 2, 2, 11]])).logits


# transformers computes the router's softmax in fp32, where the weights of equal logits are exact: 1 / 8.
@pytest.mark.parametrize("tied", [True, False])
def test_with_all_experts_and_no_noise_the_mixture_computes_what_the_dense_model_does(bough, tied):
    bough("init", "dense", "--arch", "llama", *SHAPE, *(["--tie"] if tied else []), ok=True)
    options = ("--experts", 8, "--experts-per-token", 8, "--router-noise", 0)
    bough("upcycle", "dense", "mixture", *options, ok=True)
    assert AutoModelForCausalLM.from_pretrained(bough.cwd / "mixture").config.model_type == "mixtral"
    difference = (logits(bough.cwd / "mixture") - logits(bough.cwd / "dense")).abs().max()
    assert difference <= 1e-10


def test_an_upcycled_model_is_trained(bough):
    bough("init", "dense", "--arch", "llama", *SHAPE, ok=True)
    bough("upcycle", "dense", "mixture", "--json", ok=True)
    config = json.loads((bough.cwd / "mixture/config.json").read_text())
    assert config["num_local_experts"] == 8 and config["num_experts_per_tok"] == 2
    assert config["intermediate_size"] == 6 and config["sliding_window"] is None
    lines = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (bough.cwd / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--model", "mixture", "--data", "data.jsonl", "--lr", 0.01, "--json"]
    report = bough("sft", *arguments, "--out", "out", "--max-steps", 60, ok=True, env=ENVIRONMENT).json
    assert report["last_loss"] < 0.5 * report["first_loss"], report


@pytest.mark.parametrize(
    ("arch", "arguments", "words"),
    [
        ("llama", ["--experts", 7], ["--experts", "7", "48"]),
        ("llama", ["--experts", 4, "--experts-per-token", 5], ["--experts-per-token", "5", "4"]),
        ("llama", ["--router-noise", 2], ["--router-noise", "0 to 1"]),
        ("qwen3", [], ["Qwen3", "Llama"]),
    ],
)
def test_what_cannot_be_upcycled_is_named(bough, arch, arguments, words):
    bough("init", "dense", "--arch", arch, *SHAPE, ok=True)
    refused = bough("upcycle", "dense", "mixture", *arguments)
    assert refused.returncode == 2
    assert all(word in refused.stderr for word in words), refused.stderr
    assert bough("upcycle", "dense", "dense").returncode == 2
