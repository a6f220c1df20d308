"""The table of adapter_config.json's fields in docs/lora.md, against PEFT's LoraConfig and against what Bough
reads."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from field_tables import assert_tests_exist, read_table
from safetensors.torch import load_file
from test_lora import ALPHA, RANK, write_adapter
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
ROWS = read_table(ROOT / "docs/lora.md", ["field", "read as", "why, or the test"])

# For each field that is harmless or refused, a value with a meaning.
VALUES: dict[str, Any] = {
    "bias": "all",
    "use_dora": True,
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [3],
    "target_parameters": ["experts.down_proj"],
    "layer_replication": [[0, 2], [1, 3]],
    "fan_in_fan_out": True,
    "lora_bias": True,
    "use_qalora": True,
    "alora_invocation_tokens": [3, 4],
    "arrow_config": {"top_k": 3},
    "monteclora_config": {"num_samples": 3},
    "kasa_config": {"beta": 1.0},
    "use_bdlora": {"nblocks": 2},
    "megatron_config": {"num_layers": 2},
    "target_modules": "all-linear",
    "exclude_modules": ["k_proj"],
    "layers_to_transform": [0],
    "layers_pattern": "layers",
    "lora_dropout": 0.1,
    "inference_mode": False,
    "task_type": "FEATURE_EXTRACTION",
    "auto_mapping": {"base_model_class": "X"},
    "base_model_name_or_path": "elsewhere",
    "revision": "main",
    "peft_version": "0.1.0",
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "ipm"},
    "loftq_config": {"loftq_bits": 4},
    "lora_ga_config": {"direction": "ArB2r"},
    "velora_config": {"num_groups": 8},
    "runtime_config": {"ephemeral_gpu_offload": True},
    "megatron_core": "other.core",
    "qalora_group_size": 32,
    "ensure_weight_tying": True,
}


def fields_of(kind: str) -> list[str]:
    return [row["field"].strip("`") for row in ROWS if row["read as"] == kind]


@pytest.fixture
def merge(bough, tiny_models, tmp_path):
    """Merges the same random adapter with changes to its adapter_config.json."""
    directory = tiny_models("qwen3")
    model = AutoModelForCausalLM.from_pretrained(directory)

    def run(**changes):
        for path in (tmp_path / "adapter", tmp_path / "merged"):
            shutil.rmtree(path, ignore_errors=True)
        write_adapter(tmp_path / "adapter", model, ["q_proj", "down_proj"], **changes)
        return bough("merge", directory, tmp_path / "adapter", tmp_path / "merged", "--json")

    run.weights = lambda: load_file(tmp_path / "merged" / "model.safetensors")
    run.base = load_file(directory / "model.safetensors")
    return run


def test_every_field_of_peft_has_a_row():
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields == {row["field"].strip("`") for row in ROWS}


def test_rows_name_what_exists():
    assert {row["read as"] for row in ROWS} == {"honoured", "harmless", "refused"}
    assert set(VALUES) == {*fields_of("harmless"), *fields_of("refused")}
    for row in ROWS:
        assert len(row["why, or the test"]) > 5, row
        if row["read as"] == "honoured":
            assert_tests_exist(row["why, or the test"])


def test_harmless_fields_change_nothing(merge):
    assert merge().returncode == 0
    plain = merge.weights()
    result = merge(**{field: VALUES[field] for field in fields_of("harmless")})
    assert result.returncode == 0, result
    assert all(torch.equal(tensor, plain[name]) for name, tensor in merge.weights().items())


def test_refused_fields_are_named(merge):
    for field in fields_of("refused"):
        result = merge(**{field: VALUES[field]})
        assert result.returncode == 2 and f"'{field}'" in result.stderr, (field, result)
    for field in fields_of("refused"):
        off = "none" if field == "bias" else None
        assert merge(**{field: off}).returncode == 0, field
    result = merge(a_field_of_tomorrow=True)
    assert result.returncode == 2 and "a_field_of_tomorrow" in result.stderr, result


def test_rslora_scale(merge):
    merge(use_rslora=True, lora_alpha=ALPHA)
    name = "model.layers.1.self_attn.q_proj.weight"
    scaled = merge.weights()[name] - merge.base[name]
    merge(use_rslora=False, lora_alpha=ALPHA)
    plain = merge.weights()[name] - merge.base[name]
    torch.testing.assert_close(scaled, plain * RANK**0.5, rtol=1e-4, atol=1e-5)
    assert merge(use_rslora="yes").returncode == 2


@pytest.mark.parametrize(
    "name", ["pissa", "pissa_niter_16", "PiSSA", "olora", "corda", "loftq", "lora_ga", "of_tomorrow", 3]
)
def test_initialisations(merge, name):
    """Such an adapter belongs to a base model that the initialisation changed, which no file has."""
    result = merge(init_lora_weights=name)
    assert result.returncode == 2, result
    for word in (
        "adapter_config.json",
        "init_lora_weights",
        str(name),
        "path_initial_model_for_weight_conversion",
    ):
        assert word in result.stderr, result
    for keeps in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        assert merge(init_lora_weights=keeps).returncode == 0, keeps


@pytest.mark.parametrize("name", ["pissa", "olora"])
def test_peft_changes_the_base(merge, tiny_models, tmp_path, name):
    """PEFT's own adapter without training is no change of the model. Merged into the base as published it
    would be one, so it is refused. PEFT's conversion is accepted and right."""
    directory = tiny_models("qwen3")
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj"], init_lora_weights=name)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert merge(**{"init_lora_weights": written["init_lora_weights"]}).returncode == 2
