"""Damaged model directories and rollout files, through a whole process. The program must print a message of
a few lines that names the file, exit with code 2 or 3, damage nothing, and never end by a signal or print
`terminate called`."""

import json
import os
import resource
import shutil
import signal
import struct
import subprocess
from pathlib import Path

import pytest

GOOD_LINE = {
    "group": "a",
    "input_ids": [5, 6, 7],
    "loss_mask": [0, 1, 1],
    "logprobs": [0, -0.5, -0.25],
    "reward": 1,
}


@pytest.fixture(scope="session")
def tool(build_dir: Path):
    def run(*arguments, **options):
        return subprocess.run(
            [build_dir / "bin" / "checkpoint_tool", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            **options,
        )

    return run


@pytest.fixture
def model(tiny_models, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_models("qwen3"), tmp_path / "model"))


def assert_refused(done: subprocess.CompletedProcess, *words: str, code: int = 2):
    assert done.returncode == code, done
    assert "terminate called" not in done.stderr
    assert 0 < len(done.stderr) < 2000
    assert len(done.stderr.splitlines()) <= 8
    for word in words:
        assert word in done.stderr, (word, done.stderr)


def changed_header(path: Path, change) -> None:
    """Rewrites a safetensors file's header by `change(header)`. The data do not change."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def set_length(path: Path, length: int) -> None:
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])


NORM = "model.norm.weight"

WEIGHTS = {
    "empty": (lambda path: path.write_bytes(b""), ["model.safetensors", "empty"]),
    "seven bytes": (lambda path: path.write_bytes(b"1234567"), ["model.safetensors", "7 bytes"]),
    "text": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), ["header length"]),
    "header length 2^60": (lambda path: set_length(path, 2**60), ["header length", str(2**60)]),
    "header length 2^64 - 1": (lambda path: set_length(path, 2**64 - 1), ["header length"]),
    "header length 0": (lambda path: set_length(path, 0), ["model.safetensors"]),
    "header length cuts the JSON": (lambda path: set_length(path, 100), ["model.safetensors"]),
    "cut in the header": (lambda path: os.truncate(path, 500), ["header length"]),
    "cut in the data": (lambda path: os.truncate(path, path.stat().st_size - 1), ["model.safetensors"]),
    "one byte too many": (lambda path: path.write_bytes(path.read_bytes() + b"x"), ["model.safetensors"]),
    "wrong shape": (
        lambda path: changed_header(path, lambda h: h[NORM].update(shape=[4, 12])),
        [NORM, "got [4, 12], expected [48]"],
    ),
    "shape of other bytes": (
        lambda path: changed_header(path, lambda h: h[NORM].update(shape=[47])),
        [NORM, "expected 188"],
    ),
    "shape overflows": (
        lambda path: changed_header(path, lambda h: h[NORM].update(shape=[2**62, 2**62])),
        [NORM, "2^63"],
    ),
    "unknown dtype": (
        lambda path: changed_header(path, lambda h: h[NORM].update(dtype="F4")),
        [NORM, "dtype", "F4"],
    ),
    "integer weights": (
        lambda path: changed_header(path, lambda h: h[NORM].update(dtype="I32")),
        [NORM, "Int"],
    ),
    "offsets beyond the end": (
        lambda path: changed_header(path, lambda h: h[NORM].update(data_offsets=[2**40, 2**40 + 192])),
        [NORM, "data_offsets"],
    ),
    "overlap": (
        lambda path: changed_header(path, lambda h: h[NORM].update(data_offsets=[0, 192])),
        ["overlap"],
    ),
    "missing tensor": (
        lambda path: changed_header(path, lambda h: h.update(other=h.pop(NORM))),
        ["1 missing", NORM, "1 extra", "other"],
    ),
}


@pytest.mark.parametrize("damage", WEIGHTS)
def test_weights(tool, model, tmp_path, damage):
    change, words = WEIGHTS[damage]
    change(model / "model.safetensors")
    assert_refused(tool("copy", model, tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


CONFIG = {
    "not JSON": ("{", ["config.json"]),
    "empty": ("", ["config.json", "empty"]),
    "a list": ("[]", ["config.json"]),
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel"]),
    "rope scaling": (
        {"rope_parameters": {"rope_type": "ntk", "factor": 8.0, "rope_theta": 1e4}},
        ["rope_parameters", "ntk"],
    ),
    "part of a head turned": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    "heads": ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
    "negative": ({"vocab_size": -1}, ["vocab_size", "-1"]),
    "huge": ({"vocab_size": 2**31 - 1, "hidden_size": 2**24}, ["model.embed_tokens.weight"]),
    "other width": ({"intermediate_size": 105}, ["mlp.gate_proj.weight", "expected [105, 48]"]),
    "one layer more": ({"num_hidden_layers": 4, "layer_types": None}, ["missing", "model.layers.3."]),
    "one layer less": ({"num_hidden_layers": 2, "layer_types": None}, ["extra", "model.layers.2."]),
    "other vocabulary": ({"vocab_size": 312}, ["model.embed_tokens.weight", "expected [312, 48]"]),
    "other head size": ({"head_dim": 8}, ["self_attn.q_norm.weight", "expected [8]"]),
    "other key heads": ({"num_key_value_heads": 4}, ["self_attn.k_proj.weight", "expected [64, 48]"]),
    "tied over another lm_head": (
        {"tie_word_embeddings": True},
        ["tie_word_embeddings", "got true", "lm_head.weight", "differs from", "to false"],
    ),
    "biases that are absent": ({"attention_bias": True}, ["missing", "self_attn.q_proj.bias"]),
    "norms of q and k and no biases": (
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        ["missing", "self_attn.q_proj.bias", "extra", "self_attn.k_norm.weight"],
    ),
    "no norms of q and k": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        ["extra", "self_attn.k_norm.weight"],
    ),
    "fused projections": (
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
        ["missing", "self_attn.qkv_proj.weight", "extra"],
    ),
}


@pytest.mark.parametrize("damage", CONFIG)
def test_config(tool, model, tmp_path, damage):
    change, words = CONFIG[damage]
    path = model / "config.json"
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    assert_refused(tool("copy", model, tmp_path / "out"), *words)


def test_directories(tool, model, tmp_path):
    out = tmp_path / "out"
    assert_refused(tool("copy", tmp_path / "nowhere", out), "nowhere")
    assert_refused(tool("copy", model / "config.json", out), "config.json", "a file")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert_refused(tool("copy", model, out), "pytorch_model.bin", "safetensors")
    (model / "model.safetensors").mkdir()
    assert_refused(tool("copy", model, out), "model.safetensors", "folder")


def full_disk():
    """Runs in the child process. Files stop growing at 50 kB, as on a full disk. The limit's signal is
    ignored."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))


@pytest.mark.parametrize("shard_bytes", [10**12, 20_000])
def test_full_disk_keeps_the_old_checkpoint(tool, model, tmp_path, shard_bytes):
    out = tmp_path / "out"
    assert tool("copy", model, out).returncode == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    # fp64 doubles the bytes, so the largest tensor alone exceeds the limit.
    done = tool("copy", model, out, "fp64", shard_bytes, preexec_fn=full_disk)
    assert_refused(done, str(out), code=3)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


ROLLOUTS = {
    "empty": ("", ["empty"]),
    "blank": ("\n\n", ["no rollouts"]),
    "not JSON": ("{]", ["line 2"]),
    "id outside the vocabulary": ({"input_ids": [5, 311, 7]}, ["line 2", "input_ids", "position 1", "311"]),
    "negative id": ({"input_ids": [5, 6, -7]}, ["line 2", "input_ids", "position 2", "-7"]),
    "mask too short": ({"loss_mask": [0, 1]}, ["line 2", "loss_mask", "2", "3"]),
    "not-a-number reward": ({"reward": float("nan")}, ["line 2", "reward", "NaN"]),
    "infinite advantage": ({"advantage": [0, 0, float("-inf")]}, ["line 2", "advantage", "position 2"]),
    "no reward": ({"reward": None}, ["line 2", "reward", "null"]),
    "other temperature": ({"temperature": 0.5}, ["line 2", "temperature", "0.5"]),
}


@pytest.mark.parametrize("damage", ROLLOUTS)
def test_rollouts(tool, tmp_path, damage):
    change, words = ROLLOUTS[damage]
    good = json.dumps(GOOD_LINE) + "\n"
    if isinstance(change, dict):
        text = good + json.dumps(GOOD_LINE | change)
    else:
        text = good + change if change.strip() else change
    (tmp_path / "in.jsonl").write_text(text)
    (tmp_path / "out.jsonl").write_text("old")
    assert_refused(tool("rollouts", tmp_path / "in.jsonl", tmp_path / "out.jsonl", 311), "in.jsonl", *words)
    assert (tmp_path / "out.jsonl").read_text() == "old"


def test_rollout_file_that_is_none(tool, tmp_path):
    assert_refused(tool("rollouts", tmp_path, tmp_path / "out"), "folder")
    assert_refused(tool("rollouts", tmp_path / "none", tmp_path / "out"), "none")
    (tmp_path / "in.jsonl.zst").write_text(json.dumps(GOOD_LINE))
    assert_refused(tool("rollouts", tmp_path / "in.jsonl.zst", tmp_path / "out"), "in.jsonl.zst", "zstd")


def test_full_disk_keeps_the_old_rollouts(tool, tmp_path):
    (tmp_path / "in.jsonl").write_text((json.dumps(GOOD_LINE) + "\n") * 1000)
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    assert_refused(tool("rollouts", tmp_path / "in.jsonl", out, preexec_fn=full_disk), "out.jsonl", code=3)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
