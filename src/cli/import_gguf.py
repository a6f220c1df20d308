"""Converts a GGUF file to a Hugging Face model directory. `bough import` carries this script and runs it.

The arguments are FILE FOLDER DTYPE PRE: DTYPE is fp32, bf16 or empty, PRE is a pre-tokenizer's name or empty.
Each line on stdout is one JSON object:

  {"config": {...}}   config.json. The script then waits for a line on stdin, and writes no file before it.
  {"tensors": n}      n tensors follow, {"written": 1} after each
  {"report": {...}}   FOLDER is complete
  {"refused": "..."}  the file cannot be imported: got, expected, remedy
  {"failed": "..."}   a file could not be read or written

Values are the file's own, dequantised, rounded once if they are stored in bf16. llama.cpp reorders the rows
of q and k of `llama` models; the order of Hugging Face is restored. A family of decoders is one entry of
FAMILIES. Other architectures, and metadata or tensors that the entry does not know, are refused by name."""

import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from gguf_container import CHUNK, NUMBER, TEXT, WHOLE, GgufFile, Refused, compact, damaged, quoted
from gguf_tokenizer import read_tokenizer

ROPE_FREQUENCIES = "rope_freqs.weight"  # Llama 3.1 and later: the divisors of the rotary angles
# Metadata of an architecture that this script reads or (rope.scaling.finetuned) that have no effect.
KNOWN_KEYS = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *(f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length")),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count"),
    *(f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "finetuned")),
}


class Name(NamedTuple):
    """A tensor's two names; # stands for the layer. The shape's letters: V vocabulary, D model width, F
    feed-forward width, H head size, Q = N H with N query heads, K = G H with G key/value heads."""

    gguf: str
    hugging_face: str
    shape: str
    optional: bool = False
    # llama.cpp interleaved the rows i and i + H/2 of each head. This key of config.json counts the heads.
    rotary: str = ""


def common_names(rotary):
    q, k = ("num_attention_heads", "num_key_value_heads") if rotary else ("", "")
    return [
        Name("token_embd.weight", "model.embed_tokens.weight", "VD"),
        Name("output_norm.weight", "model.norm.weight", "D"),
        Name("output.weight", "lm_head.weight", "VD", optional=True),
        Name("blk.#.attn_norm.weight", "model.layers.#.input_layernorm.weight", "D"),
        Name("blk.#.attn_q.weight", "model.layers.#.self_attn.q_proj.weight", "QD", rotary=q),
        Name("blk.#.attn_k.weight", "model.layers.#.self_attn.k_proj.weight", "KD", rotary=k),
        Name("blk.#.attn_v.weight", "model.layers.#.self_attn.v_proj.weight", "KD"),
        Name("blk.#.attn_output.weight", "model.layers.#.self_attn.o_proj.weight", "DQ"),
        Name("blk.#.ffn_norm.weight", "model.layers.#.post_attention_layernorm.weight", "D"),
        Name("blk.#.ffn_gate.weight", "model.layers.#.mlp.gate_proj.weight", "FD"),
        Name("blk.#.ffn_up.weight", "model.layers.#.mlp.up_proj.weight", "FD"),
        Name("blk.#.ffn_down.weight", "model.layers.#.mlp.down_proj.weight", "DF"),
    ]


def qkv_biases(optional, rotary):
    q, k = ("num_attention_heads", "num_key_value_heads") if rotary else ("", "")
    return [
        Name("blk.#.attn_q.bias", "model.layers.#.self_attn.q_proj.bias", "Q", optional, q),
        Name("blk.#.attn_k.bias", "model.layers.#.self_attn.k_proj.bias", "K", optional, k),
        Name("blk.#.attn_v.bias", "model.layers.#.self_attn.v_proj.bias", "K", optional),
    ]


class Family(NamedTuple):
    class_name: str  # the name in config.json's `architectures`
    names: list[Name]


# By general.architecture, which is also config.json's model_type. SmolLM2, Llama and Mistral are `llama`.
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        common_names(rotary=True)
        + qkv_biases(optional=True, rotary=True)
        + [Name("blk.#.attn_output.bias", "model.layers.#.self_attn.o_proj.bias", "D", optional=True)],
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", common_names(rotary=False) + qkv_biases(optional=False, rotary=False)
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        common_names(rotary=False)
        + [
            Name("blk.#.attn_q_norm.weight", "model.layers.#.self_attn.q_norm.weight", "H"),
            Name("blk.#.attn_k_norm.weight", "model.layers.#.self_attn.k_norm.weight", "H"),
        ],
    ),
}


def say(**message):
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def as_written(value):
    """The number that the model's author wrote. The file has it in fp32: 1e-05 is 9.99999974e-06. None if the
    number is not finite, because JSON has no such number."""
    with np.errstate(over="ignore"):
        number = float(f"{np.float32(value):.6g}")
    return number if math.isfinite(number) else None


class Importer:
    """Checks the whole file: its metadata, tokenizer and tensors. `config` is config.json."""

    def __init__(self, file, pre):
        architecture = file.get("general.architecture", TEXT)
        if architecture not in FAMILIES:
            raise Refused(
                f"metadata 'general.architecture': got {quoted(architecture)}; expected one of "
                f"{', '.join(FAMILIES)}; use the model's original Hugging Face directory"
            )
        self.file, self.architecture, self.family = file, architecture, FAMILIES[architecture]
        self.tokenizer = read_tokenizer(file, pre)
        self.refuse_unknown_keys()
        self.config = self.read_config()
        self.tensors = self.name_tensors()  # by the names of the file
        self.refuse_unknown_tensors()

    def key(self, name):
        return f"{self.architecture}.{name}"

    def size(self, name, *default):
        """A size of config.json: from 1 to 2^31, so that products of two fit 64 bits."""
        if default and self.key(name) not in self.file.metadata:
            return default[0]
        value = self.file.get(self.key(name), WHOLE)
        if not 1 <= value <= 2**31:
            raise damaged(f"metadata {quoted(self.key(name))}: got {value}; expected a number from 1 to 2^31")
        return value

    def refuse(self, name, got, expected):
        raise Refused(f"metadata {quoted(self.key(name))}: got {got}; expected {expected}")

    def refuse_unknown_keys(self):
        for name, value in sorted(self.file.metadata.items()):
            short = name.removeprefix(self.key(""))
            if short == name or short in KNOWN_KEYS:
                continue
            # With expert_count 0 the feature is off. Attention that is not causal belongs to no decoder.
            if value is True if short == "attention.causal" else value in (0, False):
                continue
            self.refuse(
                short,
                quoted(compact(value)),
                f"no such key: this feature of {self.architecture} models is not supported; use the model's "
                "original Hugging Face directory",
            )

    def read_config(self):
        file, special = self.file, self.tokenizer.special
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise Refused(
                "got no matrix 'token_embd.weight'; expected the embedding: the model is not complete. If "
                "this is one of several files, merge them with llama-gguf-split --merge"
            )
        rows = embedding.shape[0]
        if rows < self.tokenizer.num_tokens:
            raise Refused(
                f"tensor 'token_embd.weight': got {rows} rows; expected at least "
                f"{self.tokenizer.num_tokens}, the number of tokens"
            )
        width, heads = self.size("embedding_length"), self.size("attention.head_count")
        if self.key("attention.key_length") not in file.metadata and width % heads != 0:
            self.refuse("attention.head_count", heads, f"a divisor of {width}, the embedding_length")
        head_dim = self.size("attention.key_length", width // heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if (got := self.size(name, head_dim)) != head_dim:
                self.refuse(
                    name,
                    got,
                    f"{head_dim}, the size of a head: values of another size, or rotating a part of a head, "
                    "are not supported",
                )
        if (got := self.size("vocab_size", rows)) != rows:
            self.refuse("vocab_size", got, f"{rows}, the rows of 'token_embd.weight'")
        epsilon_key = self.key("attention.layer_norm_rms_epsilon")
        epsilon = as_written(file.get(epsilon_key, NUMBER, 0))
        if epsilon is not None and not epsilon > 0:
            self.refuse("attention.layer_norm_rms_epsilon", epsilon, "a number above 0")
        config = {
            "architectures": [self.family.class_name],
            "model_type": self.architecture,
            "vocab_size": rows,
            "hidden_size": width,
            "intermediate_size": self.size("feed_forward_length"),
            "num_hidden_layers": self.size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.size("context_length"),
            "hidden_act": "silu",
            "rms_norm_eps": epsilon,
            "rope_parameters": self.rope_parameters(head_dim),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
        }
        config |= {f"{name}_token_id": token for name, token in special.items()}
        if self.architecture == "llama":
            config |= {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}
        if self.architecture == "qwen3":
            config["attention_bias"] = False
        return config

    def rope_parameters(self, head_dim):
        kind = self.file.get(self.key("rope.scaling.type"), TEXT, "none")
        factor = float(self.file.get(self.key("rope.scaling.factor"), NUMBER, 1))
        theta = self.file.get(self.key("rope.freq_base"), NUMBER, 1e4)
        rope = {"rope_type": "default"}
        if ROPE_FREQUENCIES in self.file.tensors:
            if kind != "none":
                self.refuse(
                    "rope.scaling.type",
                    f"{quoted(kind)} beside the tensor '{ROPE_FREQUENCIES}'",
                    "one of the two",
                )
            rope = self.llama3_scaling(head_dim, theta)
        elif kind in ("linear", "yarn"):
            rope = {"rope_type": kind, "factor": factor if math.isfinite(factor) else None}
            if kind == "yarn":
                rope["original_max_position_embeddings"] = self.size("rope.scaling.original_context_length")
        elif kind != "none":
            self.refuse("rope.scaling.type", quoted(kind), "none, linear or yarn: no other type is supported")
        return rope | {"rope_theta": as_written(theta)}

    def llama3_scaling(self, head_dim, theta):
        """Recovers the scaling from the divisors of the angles, because llama.cpp stores only these. The
        divisors follow from the factor, which is the largest divisor, and three numbers shared by all models.
        The divisor is 1 if the wavelength is below 8192 / 4 positions, the factor if it is above 8192, and a
        blend in between."""
        original, low, high = 8192, 1.0, 4.0
        stored = np.concatenate([*self.file.chunks(ROPE_FREQUENCIES), []])
        factor = stored.max(initial=0)
        equal = stored.size > 0 and 2 * stored.size == head_dim and factor >= 1
        if equal:
            with np.errstate(all="ignore"):
                wave = 2 * math.pi * float(theta) ** (np.arange(0, head_dim, 2) / head_dim)
                smooth = np.clip((original / wave - low) / (high - low), 0, 1)
                expected = 1 / ((1 - smooth) / factor + smooth)
                equal = bool((abs(stored - expected) <= 1e-5 * expected).all())
        if not equal:
            raise Refused(
                f"tensor '{ROPE_FREQUENCIES}': got divisors of the rotary angles that differ from those of "
                "Llama 3 (factor, 1, 4, 8192); expected these: use the model's original Hugging Face "
                "directory"
            )
        return {
            "rope_type": "llama3",
            "factor": as_written(factor),
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    def name_tensors(self):
        config, tensors, layers = self.config, self.file.tensors, self.config["num_hidden_layers"]
        if layers > len(tensors):
            raise damaged(
                f"metadata {quoted(self.key('block_count'))}: got {layers}; expected at most {len(tensors)}, "
                "the number of tensors"
            )
        head_dim = config["head_dim"]
        sizes = {"V": config["vocab_size"], "D": config["hidden_size"], "F": config["intermediate_size"]}
        sizes |= {"H": head_dim, "Q": config["num_attention_heads"] * head_dim}
        sizes["K"] = config["num_key_value_heads"] * head_dim
        named = {}
        for name in self.family.names:
            shape = tuple(sizes[letter] for letter in name.shape)
            for layer in range(layers if "#" in name.gguf else 1):
                gguf_name = name.gguf.replace("#", str(layer))
                if gguf_name in tensors:
                    got = tensors[gguf_name].shape
                    if got != shape:
                        raise Refused(
                            f"tensor {quoted(gguf_name)}: got the shape {compact(got)}; expected "
                            f"{compact(shape)}, as the metadata says"
                        )
                    hugging_face = name.hugging_face.replace("#", str(layer))
                    named[gguf_name] = name._replace(gguf=gguf_name, hugging_face=hugging_face)
                # Biases come in all layers or in none, as the first layer has them.
                elif not name.optional or (layer > 0 and name.gguf.replace("#", "0") in named):
                    raise Refused(
                        f"got no tensor {quoted(gguf_name)}; expected it in a {self.architecture} model"
                    )
        return named

    def refuse_unknown_tensors(self):
        for name in sorted(self.file.tensors):
            if name not in self.tensors and name != ROPE_FREQUENCIES:
                raise Refused(
                    f"got a tensor {quoted(name)}; expected none of this name in a {self.architecture} model "
                    f"of {self.config['num_hidden_layers']} layers: its purpose is not known, so it cannot "
                    "be left out"
                )
        if self.architecture != "llama":
            return
        q_bias = "blk.0.attn_q.bias" in self.tensors
        for name in ("blk.0.attn_k.bias", "blk.0.attn_v.bias", "blk.0.attn_output.bias"):
            if (name in self.tensors) != q_bias:
                got, beside = ("no tensor", "a") if q_bias else ("a tensor", "no")
                raise Refused(
                    f"got {got} {quoted(name)} beside {beside} 'blk.0.attn_q.bias'; expected biases of q, k, "
                    "v and output together or none"
                )

    def natural_dtype(self):
        """bf16, or fp32 if a matrix is F32 or F16: bf16 would lose bits that the file has."""
        wide = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
        matrices = (tensor for tensor in self.file.tensors.values() if len(tensor.shape) == 2)
        return "fp32" if any(tensor.type in wide for tensor in matrices) else "bf16"

    def chunks(self, name):
        """Yields the tensor's values in fp32 in the order of Hugging Face."""
        if not name.rotary:
            yield from self.file.chunks(name.gguf)
            return
        heads, half = self.config[name.rotary], self.config["head_dim"] // 2
        values = np.concatenate(list(self.file.chunks(name.gguf)))
        values = values.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(-1)
        yield from (values[begin : begin + CHUNK] for begin in range(0, values.size, CHUNK))

    def write(self, folder, dtype):
        config, tokenizer = self.config, self.tokenizer
        config["dtype"] = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        generation = {"do_sample": True}
        generation |= {f"{key}_token_id": tokenizer.special[key] for key in ("bos", "pad")}
        generation["eos_token_id"] = (
            tokenizer.stops[0] if len(tokenizer.stops) == 1 else tokenizer.stops or None
        )
        generation = {key: value for key, value in generation.items() if value is not None}
        tokenizer.tokenizer_config["model_max_length"] = config["max_position_embeddings"]
        (folder / "tokenizer.json").write_text(compact(tokenizer.tokenizer), "utf-8")
        for name, value in (
            ("tokenizer_config", tokenizer.tokenizer_config),
            ("generation_config", generation),
        ):
            write_pretty(folder / f"{name}.json", value)
        say(tensors=len(self.tensors))
        self.write_weights(folder / "model.safetensors", dtype)
        write_pretty(folder / "config.json", config)

    def write_weights(self, path, dtype):
        """Writes safetensors. The header follows from the shapes, so the tensors are streamed after it."""
        width = {"fp32": 4, "bf16": 2}[dtype]
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name in self.tensors.values():
            shape = self.file.tensors[name.gguf].shape
            begin, end = end, end + width * math.prod(shape)
            header[name.hugging_face] = {
                "dtype": {"fp32": "F32", "bf16": "BF16"}[dtype],
                "shape": shape,
                "data_offsets": [begin, end],
            }
        text = compact(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as the format recommends
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in self.tensors.values():
                for values in self.chunks(name):
                    if dtype == "bf16":
                        values = quantize(values.reshape(1, -1), GGMLQuantizationType.BF16)
                    stream.write(values.data)
                say(written=1)


def write_pretty(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n", "utf-8")


def main(file, folder, dtype, pre):
    try:
        importer = Importer(GgufFile(file), pre)
        say(config=importer.config | {"dtype": "float32"})
        if not sys.stdin.buffer.readline():
            return
        dtype = dtype or importer.natural_dtype()
        importer.write(Path(folder), dtype)
        tokenizer = importer.tokenizer
        say(
            report={
                "architecture": importer.family.class_name,
                "dtype": dtype,
                "tokenizer": tokenizer.description,
                "tokens": tokenizer.num_tokens,
            }
        )
    except Refused as refusal:
        say(refused=str(refusal))
    except OSError as error:
        say(failed=error.strerror or str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
