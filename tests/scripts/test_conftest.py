"""The fixtures that other tests rely on: the environment guard, the program's result, and the small
models."""

import json
from pathlib import Path

import pytest
from conftest import Bough, Result
from host_env import amx_is_half_virtualised

SOUND = "processor\t: 0\ncpuid level\t: 31\nflags\t\t: fpu avx512f amx_tile amx_bf16\n"


def test_amx_guard_is_on_only_where_the_tile_leaf_is_hidden():
    assert amx_is_half_virtualised(SOUND.replace(": 31", ": 28"))
    assert not amx_is_half_virtualised(SOUND)
    assert not amx_is_half_virtualised(SOUND.replace(": 31", ": 28").replace("amx_tile amx_bf16", ""))
    assert not amx_is_half_virtualised("model name : ARMv8\n")


def test_result_reads_the_last_line_as_json():
    assert Result(0, 'log\n{"tokens": 3}\n', "").json == {"tokens": 3}
    assert Result(0, '{"tokens": 3}\nlog\n', "").json is None
    assert Result(0, "", "").json is None


def test_bough_fails_the_test_with_all_output(tmp_path: Path):
    program = tmp_path / "bough"
    program.write_text('#!/bin/sh\necho "got $1 in $PWD"; echo wrong >&2; exit 2\n')
    program.chmod(0o755)
    result = Bough(program, tmp_path)("plan")
    assert (result.returncode, result.stdout, result.stderr) == (2, f"got plan in {tmp_path}\n", "wrong\n")
    with pytest.raises(pytest.fail.Exception, match="exit code 2[^$]*wrong"):
        Bough(program, tmp_path)("plan", ok=True)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2_tied", "llama"])
def test_tiny_models_are_read_back_and_repeat(architecture: str, tiny_models, tmp_path: Path):
    import torch
    from safetensors.torch import load_file
    from tiny_models import ARCHITECTURES, make_tiny_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tiny_models(architecture)
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == ARCHITECTURES[architecture]["model_type"]
    weights = load_file(directory / "model.safetensors")
    tied = ARCHITECTURES[architecture]["tie_word_embeddings"]
    assert ("lm_head.weight" in weights) == (not tied)
    assert all(weights[name].std() > 0.05 for name in weights)  # no norm at 1, no bias at 0

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    again = make_tiny_model(architecture)
    ids = torch.arange(1, 9)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert not torch.equal(model(ids).logits, make_tiny_model(architecture, seed=1)(ids).logits)

    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "<|im_start|>user\nthe 12 naïve 数<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and max(ids) < config["vocab_size"]
