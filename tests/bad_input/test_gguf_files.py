"""GGUF files that are damaged, adversarial, or of a kind that `bough import` does not read. Most tests call
the modules of the import script directly. The last tests run the program."""

import json
import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src" / "cli"))

from gguf_container import LIST, TEXT, WHOLE, GgufFile, Refused  # noqa: E402
from import_gguf import Importer  # noqa: E402

HUGE = 2**64 - 1
F32, Q4_0, Q4_1, Q8_0, Q5_K = 0, 2, 3, 8, 13
UINT8, UINT32, FLOAT32, STRING, ARRAY = 0, 4, 6, 8, 9


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def text(value: str) -> bytes:
    return u64(len(value)) + value.encode()


def header(tensors: int, entries: int, version: int = 3) -> bytes:
    return b"GGUF" + u32(version) + u64(tensors, entries)


def integer(name: str, value: int) -> bytes:
    return text(name) + u32(UINT32, value)


def word(name: str, value: str) -> bytes:
    return text(name) + u32(STRING) + text(value)


def words(name: str, values: list[str]) -> bytes:
    return text(name) + u32(ARRAY, STRING) + u64(len(values)) + b"".join(map(text, values))


def tensor(name: str, inner_first: list[int], kind: int, offset: int) -> bytes:
    return text(name) + u32(len(inner_first)) + u64(*inner_first) + u32(kind) + u64(offset)


def aligned(content: bytes) -> bytes:
    return content + bytes(-len(content) % 32)


def tiny_llama() -> bytes:
    """A llama of one layer, width 32, 2 heads, feed-forward 32. The matrices are Q8_0, except one in F32."""
    tokens = ["<s>", "a", "b", "ab", "<e>"]
    square = [32, 32]
    matrices = {
        "token_embd.weight": ([32, 5], Q8_0),
        "output_norm.weight": ([32], F32),
        "blk.0.attn_norm.weight": ([32], F32),
        "blk.0.attn_q.weight": (square, Q8_0),
        "blk.0.attn_k.weight": (square, Q8_0),
        "blk.0.attn_v.weight": (square, Q8_0),
        "blk.0.attn_output.weight": (square, F32),
        "blk.0.ffn_norm.weight": ([32], F32),
        "blk.0.ffn_gate.weight": (square, Q8_0),
        "blk.0.ffn_up.weight": (square, Q8_0),
        "blk.0.ffn_down.weight": (square, Q8_0),
    }
    content = header(len(matrices), 14)
    content += word("general.architecture", "llama")
    content += integer("llama.block_count", 1) + integer("llama.context_length", 64)
    content += integer("llama.embedding_length", 32) + integer("llama.feed_forward_length", 32)
    content += integer("llama.attention.head_count", 2)
    content += text("llama.attention.layer_norm_rms_epsilon") + u32(FLOAT32) + struct.pack("<f", 1e-5)
    content += word("tokenizer.ggml.model", "gpt2") + word("tokenizer.ggml.pre", "gpt-2")
    content += words("tokenizer.ggml.tokens", tokens) + words("tokenizer.ggml.merges", ["a b"])
    content += integer("tokenizer.ggml.bos_token_id", 0) + integer("tokenizer.ggml.eos_token_id", 4)
    content += text("tokenizer.ggml.token_type") + u32(ARRAY, 5) + u64(len(tokens)) + u32(3, 1, 1, 1, 3)
    draw, data = random.Random(1), b""
    for name, (shape, kind) in matrices.items():
        content += tensor(name, shape, kind, len(data))
        elements = int(np.prod(shape))
        if kind == Q8_0:  # blocks of 32 with the scale 1/16
            blocks = (b"\x00\x2c" + draw.randbytes(32) for _ in range(elements // 32))
            data += aligned(b"".join(blocks))
        else:
            data += aligned(struct.pack(f"<{elements}f", *(draw.randrange(16) / 16 for _ in range(elements))))
    return aligned(content) + data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def expect_names(message: str, *names: str) -> None:
    for name in names:
        assert name in message, message


@pytest.fixture
def refusal(path: Path):
    """`refusal(content)` returns the reason why a file with this content cannot be read."""

    def refuse(content: bytes) -> str:
        with pytest.raises(Refused) as caught:
            GgufFile(written(path, content))
        return str(caught.value)

    return refuse


def replaced(content: bytes, old: bytes, new: bytes) -> bytes:
    assert old in content
    return content.replace(old, new, 1)


def test_metadata_and_tensors_are_read(path):
    file = GgufFile(written(path, tiny_llama()))
    assert file.get("general.architecture", TEXT) == "llama"
    assert file.get("llama.context_length", WHOLE) == 64
    assert len(file.get("tokenizer.ggml.tokens", LIST)) == 5
    assert file.tensors["token_embd.weight"].shape == (5, 32)
    assert sum(values.size for values in file.chunks("blk.0.ffn_up.weight")) == 32 * 32


def test_other_files_are_refused(refusal):
    expect_names(refusal(b"PK\x03\x04 and more bytes"), "PK", "expected a GGUF file")
    expect_names(refusal(b"GG"), "GG", "expected a GGUF file")
    expect_names(refusal(header(0, 0, 1)), "version 1", "expected 2 or 3", "convert")
    expect_names(refusal(header(0, 0, 0x03000000)), "big-endian", "little-endian")


def test_counts_are_checked_against_the_file_before_memory_is_taken(refusal):
    expect_names(refusal(header(HUGE, 0)), "the number of tensors", "got 18446744073709551615")
    expect_names(refusal(header(0, HUGE)), "the number of metadata entries", "damaged")
    expect_names(refusal(header(0, 1) + u64(HUGE, HUGE)), "key of metadata entry 0")
    array = header(0, 1) + text("list") + u32(ARRAY, UINT8) + u64(HUGE)
    expect_names(refusal(array), "'list'", "got 18446744073709551615")
    nested = header(0, 1) + text("list") + u32(ARRAY) + (u32(ARRAY) + u64(1)) * 9
    expect_names(refusal(nested), "'list'", "nested")
    wide = aligned(header(1, 0) + tensor("w", [HUGE, 2], F32, 0))
    expect_names(refusal(wide), "'w'", "dimension 0", "damaged")
    twice = aligned(header(0, 2) + integer("a", 1) + integer("a", 2))
    expect_names(refusal(twice), "'a'", "twice")


def test_tensors_lie_within_the_file_without_overlap(refusal, path):
    def two(first: int, second: int, size: int) -> bytes:
        return aligned(header(2, 0) + tensor("x", [8], F32, first) + tensor("y", [8], F32, second)) + bytes(
            size
        )

    assert len(GgufFile(written(path, two(0, 32, 64))).tensors) == 2
    expect_names(refusal(two(0, 32, 63)), "'y'", "63 bytes of data", "cut off")
    expect_names(refusal(two(0, 0, 64)), "begin at", "ends")
    expect_names(refusal(two(0, 33, 128)), "'y'", "offset 33", "multiple of 32")
    expect_names(refusal(two(0, 2**63, 64)), "'y'", "offset 9223372036854775808")


def test_other_types_are_refused_by_name(refusal):
    q5 = aligned(header(1, 0) + tensor("blk.0.ffn_up.weight", [256], Q5_K, 0))
    expect_names(refusal(q5), "'blk.0.ffn_up.weight'", "type Q5_K", "Q4_K or Q6_K", "use a file")
    expect_names(refusal(aligned(header(1, 0) + tensor("w", [256], 99, 0))), "type 99")
    odd = aligned(header(1, 0) + tensor("w", [33], Q8_0, 0))
    expect_names(refusal(odd), "rows of 33", "multiple of 32", "Q8_0")


@pytest.mark.parametrize(
    ("kind", "block", "expected"),
    [
        # Scale 2, quanta 0 (element 0), 15 (element 16) and 8.
        (Q4_0, b"\x00\x40" + b"\xf0" + b"\x88" * 15, {0: -16, 16: 14, 1: 0}),
        # Scale 2, minimum -1, quanta 0 (element 0) and 15 (element 16).
        (Q4_1, b"\x00\x40\x00\xbc" + b"\xf0" + bytes(15), {0: -1, 16: 29}),
    ],
)
def test_blocks_are_dequantised(path, kind, block, expected):
    file = GgufFile(written(path, aligned(header(1, 0) + tensor("w", [32], kind, 0)) + block))
    [values] = file.chunks("w")
    assert {i: values[i] for i in expected} == expected


def test_a_large_tensor_comes_in_chunks(path, monkeypatch):
    draw = random.Random(5)
    blocks = b"".join(b"\x00\x2c" + draw.randbytes(32) for _ in range(1541))
    elements = len(blocks) // 34 * 32
    file = GgufFile(written(path, aligned(header(1, 0) + tensor("w", [elements], Q8_0, 0)) + blocks))
    [whole] = file.chunks("w")
    monkeypatch.setattr("gguf_container.CHUNK", 256 * 64)
    chunks = list(file.chunks("w"))
    assert len(chunks) == 4 and np.array_equal(np.concatenate(chunks), whole)


def test_an_unknown_feature_is_refused_by_name(path):
    def import_refusal(content: bytes) -> str:
        with pytest.raises(Refused) as caught:
            Importer(GgufFile(written(path, content)), "")
        return str(caught.value)

    content = tiny_llama()
    value = u32(STRING) + text("llama")
    falcon = replaced(content, value, u32(STRING) + text("falco"))
    expect_names(import_refusal(falcon), "general.architecture", "'falco'", "llama, qwen2, qwen3")
    expect_names(
        import_refusal(replaced(content, b"gpt-2", b"gpt-9")), "tokenizer.ggml.pre", "'gpt-9'", "--pre"
    )
    expect_names(import_refusal(replaced(content, b"gpt2", b"bert")), "tokenizer.ggml.model", "'bert'")
    scaled = replaced(content, b"context_length", b"logit_scale_xx")
    expect_names(import_refusal(scaled), "'llama.logit_scale_xx'", "not supported")
    renamed = replaced(content, b"ffn_up", b"ffn_xx")
    expect_names(import_refusal(renamed), "no tensor 'blk.0.ffn_up.weight'")
    expect_names(import_refusal(replaced(content, b"a b", b"b b")), "merge 0", "'\"b b\"'")


def test_damaged_files_are_refused_or_read(path):
    """Only Refused may be raised, whichever bits of the header are flipped."""
    whole = tiny_llama()
    # The last 11,200 bytes are weights. A flip there only changes a weight.
    draw, end, refused, accepted = random.Random(7), len(whole) - 11_200, 0, 0
    for i in range(600):
        content = bytearray(whole)
        if i % 4 == 0:
            del content[draw.randrange(1, len(whole)) :]
        else:
            for _ in range(draw.randint(1, 3)):
                content[draw.randrange(end)] ^= 1 << draw.randrange(8)
        try:
            Importer(GgufFile(written(path, bytes(content))), "")
            accepted += 1
        except Refused as refusal:
            refused += 1
            assert len(str(refusal)) < 2000
    assert refused > 300 and accepted > 5


# -- the program ---------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_an_imported_directory_is_a_model(bough, build_dir, path, tmp_path):
    report = bough("import", written(path, tiny_llama()), "out", "--json", ok=True).json
    assert report["architecture"] == "LlamaForCausalLM"
    assert report["dtype"] == "fp32"  # one matrix is F32
    assert report["tokenizer"] == "gpt2/gpt-2" and report["tokens"] == 5
    assert report["parameters"] == sum(
        tensor.size for tensor in load_file(tmp_path / "out" / "model.safetensors").values()
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1 and config["tie_word_embeddings"] is True
    command = [build_dir / "bin" / "logits_tool", tmp_path / "out", "fp32", tmp_path / "logits.safetensors"]
    subprocess.run(command, input="1 2 3\n", text=True, check=True)
    assert names(tmp_path) == ["logits.safetensors", "model.gguf", "out"]


def test_a_folder_is_replaced_only_if_asked_and_a_model(bough, path, tmp_path):
    written(path, tiny_llama())
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    done = bough("import", path, "out")
    assert done.returncode == 2
    expect_names(done.stderr, "not empty", "--force")
    done = bough("import", path, "out", "--force")
    assert done.returncode == 2
    expect_names(done.stderr, "no config.json")
    assert names(out) == ["thesis.txt"]
    (out / "config.json").write_text("{}")
    bough("import", path, "out", "--force", ok=True)
    assert "thesis.txt" not in names(out)


@pytest.mark.parametrize("name", ["missing.gguf", "folder", "empty.gguf"])
def test_a_path_without_a_file_is_refused(bough, tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.gguf").touch()
    done = bough("import", name, "out")
    assert done.returncode == 2 and name in done.stderr
    assert names(tmp_path) == ["empty.gguf", "folder"]


def test_a_config_that_no_model_has_is_refused_before_a_file_is_written(bough, path, tmp_path):
    written(
        path,
        replaced(
            tiny_llama(), integer("llama.attention.head_count", 2), integer("llama.attention.head_count", 32)
        ),
    )
    done = bough("import", path, "new/out")
    assert done.returncode == 2
    expect_names(done.stderr, "as config.json", "head_dim")
    assert names(tmp_path) == ["model.gguf"]


def test_a_folder_that_cannot_be_written_is_a_failure_at_run_time(bough, path, tmp_path):
    written(path, tiny_llama())
    limited = ["/bin/sh", "-c", 'ulimit -f 8; exec "$0" import model.gguf out', bough.program]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done
    expect_names(done.stderr, "File too large", "out")
    assert names(tmp_path) == ["model.gguf"]


def test_a_python_without_the_package_is_named_with_its_pip_line(bough, path, tmp_path):
    written(path, tiny_llama())
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    done = bough("import", path, "out", env={"BOUGH_PYTHON": str(bare / "bin" / "python"), "PYTHONPATH": ""})
    assert done.returncode == 2
    requirement = re.search(r"^gguf==\S+", (ROOT / "requirements.txt").read_text(), re.M)[0]
    expect_names(done.stderr, f"{bare}/bin/python -m pip install {requirement}", "BOUGH_PYTHON")
    assert names(tmp_path) == ["bare", "model.gguf"]


def test_a_python_that_is_none_is_named(bough, path, tmp_path):
    written(path, tiny_llama())
    done = bough("import", path, "out", env={"BOUGH_PYTHON": "/nowhere/python"})
    assert done.returncode == 2
    expect_names(done.stderr, "BOUGH_PYTHON", "/nowhere/python")
    done = bough("import", path, "out", env={"BOUGH_PYTHON": "false"})
    assert done.returncode == 3
    expect_names(done.stderr, "exited with status 1", "BOUGH_PYTHON")
    assert names(tmp_path) == ["model.gguf"]


def test_modules_of_the_working_directory_are_not_loaded(bough, path, tmp_path):
    written(path, tiny_llama())
    for module in ("json", "numpy", "gguf"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('the wrong module')\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bough("import", path, "out", env=environment, ok=True)
