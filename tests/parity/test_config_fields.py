"""The table of config.json's keys in docs/models.md, against the config classes of transformers and against
what Bough reads."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from field_tables import assert_tests_exist, read_table
from tiny_models import MODEL_TYPES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
ROWS = read_table(ROOT / "docs/models.md", ["key", "families", "read as", "why, or the test"])

# For each key that is harmless or refused, a value with a meaning.
VALUES: dict[str, Any] = {
    "dtype": "bfloat16",
    "torch_dtype": "float16",
    "initializer_range": 0.5,
    "use_cache": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "return_dict": False,
    "chunk_size_feed_forward": 3,
    "id2label": {"0": "no", "1": "yes"},
    "label2id": {"no": 0, "yes": 1},
    "problem_type": "regression",
    "pad_token_id": 5,
    "bos_token_id": 7,
    "pretraining_tp": 2,
    "transformers_version": "3.0.0",
    "_name_or_path": "elsewhere",
    "_sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": True,
    "attention_dropout": 0.1,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "is_encoder_decoder": True,
    "is_causal": False,
    "per_layer_config": {"0": {"sliding_window": 7}},
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "router_jitter_noise": 0.1,
    "quantization_config": {"quant_method": "gptq", "bits": 4},
}


def keys_of(family: str, kind: str = "") -> set[str]:
    return {
        row["key"].strip("`")
        for row in ROWS
        if row["families"] in ("all", family) or family in row["families"].split()
        if kind in ("", row["read as"])
    }


@pytest.fixture
def read(build_dir: Path, tmp_path):
    def run(directory):
        return subprocess.run(
            [build_dir / "bin" / "checkpoint_tool", "copy", directory, tmp_path / "out"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def with_keys(source, directory, keys):
    shutil.copytree(source, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return directory


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_every_key_of_the_class_has_a_row(family):
    config = CONFIG_MAPPING[family]
    fields = {field.name for field in dataclasses.fields(config)} | set(config().to_dict())
    assert fields - keys_of(family) == set(), "keys without a row in docs/models.md"
    assert len(ROWS) == len({row["key"] for row in ROWS})


def test_rows_name_what_exists():
    assert {row["read as"] for row in ROWS} == {"honoured", "harmless", "refused"}
    named = {f for row in ROWS if row["families"] != "all" for f in row["families"].split()}
    assert named <= set(MODEL_TYPES)
    for row in ROWS:
        assert len(row["why, or the test"]) > 5, row
        if row["read as"] == "honoured":
            assert_tests_exist(row["why, or the test"])


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_harmless_keys_change_nothing(read, tiny_models, tmp_path, family):
    architecture = {"gemma3_text": "gemma3"}.get(family, family)
    changed = with_keys(
        tiny_models(architecture),
        tmp_path / "model",
        {key: VALUES[key] for key in keys_of(family, "harmless")},
    )
    assert read(changed).returncode == 0
    logits = []
    for directory in (tiny_models(architecture), changed):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        model.config.return_dict = True  # transformers' own classes fail without it
        with torch.no_grad():
            logits.append(model(torch.arange(3, 40).unsqueeze(0)).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_refused_keys_are_named(read, tiny_models, tmp_path, family):
    source = tiny_models({"gemma3_text": "gemma3"}.get(family, family))
    for key in keys_of(family, "refused"):
        done = read(with_keys(source, tmp_path / key, {key: VALUES[key]}))
        assert done.returncode == 2 and key in done.stderr and "config.json" in done.stderr, (key, done)


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_use_sliding_window_false_is_accepted(read, tiny_models, tmp_path, family):
    source = tiny_models({"gemma3_text": "gemma3"}.get(family, family))
    done = read(with_keys(source, tmp_path / "model", {"use_sliding_window": False}))
    assert done.returncode == 0, done
