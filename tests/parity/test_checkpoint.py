"""Model directories against transformers, bit for bit: Bough reads what transformers writes, and transformers
reads what Bough writes."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import ARCHITECTURES, MODEL_TYPES, make_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture(scope="session")
def tool(build_dir: Path):
    def run(*arguments):
        done = subprocess.run(
            [build_dir / "bin" / "checkpoint_tool", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    return run


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """Loads the weights with transformers, which must find none missing, extra or of the wrong shape."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[problem], (problem, info[problem])
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


def stored_names(directory: Path) -> set[str]:
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_copy_is_equal(tool, tiny_models, tmp_path, architecture):
    source = tiny_models(architecture)
    tool("copy", source, tmp_path / "out")
    assert_same(weights_of(source), weights_of(tmp_path / "out"))
    assert stored_names(source) == stored_names(tmp_path / "out")
    # Saving does not change the config, and the tokenizer files are copied.
    assert json.loads((source / "config.json").read_text()) == json.loads(
        (tmp_path / "out" / "config.json").read_text()
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (source / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2_tied", "llama", "qwen3_moe"])
def test_shards_and_bf16(tool, tmp_path, architecture):
    model = make_tiny_model(architecture).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    # Read from shards and write one file, then the other way round.
    tool("copy", tmp_path / "in", tmp_path / "one", "bf16")
    assert os.path.exists(tmp_path / "one" / "model.safetensors")
    assert_same(weights_of(tmp_path / "in"), weights_of(tmp_path / "one"))
    tool("copy", tmp_path / "one", tmp_path / "many", "bf16", 40_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert_same(weights_of(tmp_path / "in"), weights_of(tmp_path / "many"))
    # Widening is exact. The config names the stored dtype.
    tool("copy", tmp_path / "in", tmp_path / "wide", "fp32")
    wide = weights_of(tmp_path / "wide")
    assert all(tensor.dtype == torch.float32 for tensor in wide.values())
    assert_same(weights_of(tmp_path / "in"), {name: tensor.bfloat16() for name, tensor in wide.items()})


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe_dense_layer", "olmoe"])
def test_experts_of_one_tensor(tool, tmp_path, architecture):
    """transformers' modules hold all experts of a layer in one tensor. Bough reads files with such tensors,
    and writes a tensor for each expert, as save_pretrained does."""
    model = make_tiny_model(architecture)
    model.save_pretrained(tmp_path / "in")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored_names(tmp_path / "fused")
    tool("copy", tmp_path / "fused", tmp_path / "out")
    assert stored_names(tmp_path / "out") == stored_names(tmp_path / "in")
    assert_same(weights_of(tmp_path / "in"), weights_of(tmp_path / "out"))


def test_rounds_to_bf16_as_torch_does(tool, tiny_models, tmp_path):
    tool("copy", tiny_models("qwen3"), tmp_path / "out", "bf16")
    expected = {name: tensor.bfloat16() for name, tensor in weights_of(tiny_models("qwen3")).items()}
    assert_same(expected, weights_of(tmp_path / "out"))


def test_llama_with_biases(tool, tmp_path):
    make_tiny_model("llama", attention_bias=True).save_pretrained(tmp_path / "in")
    tool("copy", tmp_path / "in", tmp_path / "out")
    assert_same(weights_of(tmp_path / "in"), weights_of(tmp_path / "out"))


def test_config_of_older_versions(tool, tiny_models, tmp_path):
    """Configs of transformers before version 5: rope_theta beside rope_scaling, torch_dtype, no
    layer_types."""
    shutil.copytree(tiny_models("llama"), tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    tool("copy", tmp_path / "in", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert_same(weights_of(tiny_models("llama")), weights_of(tmp_path / "out"))


def test_order_and_padding_of_the_safetensors_library(tool, tiny_models, tmp_path):
    """Files by the library's own writer: mixed dtypes, a buffer of old checkpoints, the tied head stored
    twice."""
    source = tiny_models("llama_tied")
    shutil.copytree(source, tmp_path / "in")
    tensors = {name: tensor.clone() for name, tensor in weights_of(source).items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6, dtype=torch.float16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt", "note": "ünïcode"})
    tool("copy", tmp_path / "in", tmp_path / "out")
    assert_same(weights_of(source), weights_of(tmp_path / "out"))


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_new_model(tool, tmp_path, architecture):
    tool("new", architecture, tmp_path / "out")
    weights = weights_of(tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.model_type == architecture
    rope = config.rope_parameters
    assert rope.get("full_attention", rope)["rope_theta"] == 12345
    # config.json has every key that transformers writes for such a model. No key is left to its default.
    config.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    again.pop("transformers_version")
    again.pop("_sliding_window_pattern", None)  # Gemma 3's class made layer_types from this key
    if architecture == "qwen2":
        written.pop("head_dim")  # Qwen2's class keeps this key only if it is not width / heads
        again.pop("head_dim", None)
    assert written == again
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
