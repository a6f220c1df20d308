"""Small random models as transformers writes them. The same seed gives the same model. For tests only."""

import copy
from pathlib import Path
from typing import Any

# No two sizes are equal, so that a swapped dimension cannot pass. The head size differs from width / heads if
# the architecture allows that (Qwen3).
_COMMON = {
    "vocab_size": 311,
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}

_LLAMA = {"model_type": "llama", "tie_word_embeddings": False, "rope_theta": 5e5}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "moe_intermediate_size": 36,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "rope_theta": 1e6,
}
_WINDOW = 512  # longer than the tests' sequences: a model with windows is refused beyond it

# Families first, then variants of their layers. The name tells which variant fails.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False, "rope_theta": 1e6},
    "qwen3_tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, "rope_theta": 1e6},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e4},
    "llama": _LLAMA,
    "llama_tied": {**_LLAMA, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": _WINDOW, "rope_theta": 1e4},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": _WINDOW,
        "rope_theta": 1e4,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "rope_theta": 2e6},
    "phi3": {"model_type": "phi3", "sliding_window": _WINDOW, "rope_theta": 1e4},
    "olmo2": {"model_type": "olmo2", "tie_word_embeddings": False, "rope_theta": 5e5},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen3_moe": {**_QWEN3_MOE, "norm_topk_prob": True},
    "olmoe": {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 3, "rope_theta": 1e4},
    # The middle layer is dense, and every token uses all experts.
    "qwen3_moe_dense_layer": {**_QWEN3_MOE, "mlp_only_layers": [1], "num_experts_per_tok": 5},
    "qwen3_moe_steps": {**_QWEN3_MOE, "decoder_sparse_step": 2, "num_experts_per_tok": 1},
    "olmoe_clip": {
        "model_type": "olmoe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "clip_qkv": 1.5,
        "norm_topk_prob": True,
        "rope_theta": 1e4,
    },
    "llama_biases": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "qwen3_biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "rope_theta": 1e6},
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": 1,
        "sliding_window": _WINDOW,
        "rope_theta": 1e6,
    },
    "llama_linear": {
        **_LLAMA,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
    "llama_dynamic": {
        **_LLAMA,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    },
    # Compared with the original length, the six wavelengths of a head are short, medium and long.
    "llama_llama3": {
        **_LLAMA,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
            "rope_theta": 1e3,
        },
    },
    "qwen3_yarn": {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "rope_theta": 1e3,
        },
    },
    "llama_yarn_mscale": {
        **_LLAMA,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "original_max_position_embeddings": 256,
            "rope_theta": 1e3,
        },
    },
    # Three heads of size 16. RoPE rotates 8 elements of each.
    "phi3_longrope": {
        "model_type": "phi3",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "original_max_position_embeddings": 400,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.25, 1.5, 2.0],
            "long_factor": [1.5, 3.0, 6.0, 12.0],
        },
    },
}

# The families, by the model_type of their config.json.
MODEL_TYPES: list[str] = list(dict.fromkeys(settings["model_type"] for settings in ARCHITECTURES.values()))


def make_tiny_model(architecture: str, seed: int = 0, **overrides: Any):
    """A transformers model in fp32 and eval mode. Norm weights and biases are random too. transformers
    initializes them to 1 and 0, which would hide a forgotten one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**_COMMON, **ARCHITECTURES[architecture], **overrides}
    # transformers 5 reads the rotary base from rope_parameters. Older checkpoints have rope_theta.
    theta = settings.pop("rope_theta", None)
    settings.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": theta})
    # transformers keeps given values and fills in missing ones.
    settings["rope_parameters"] = copy.deepcopy(settings["rope_parameters"])
    is_gemma = settings["model_type"].startswith("gemma")
    if is_gemma:
        settings["hidden_activation"] = "gelu_pytorch_tanh"
        del settings["hidden_act"]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    center = 0.0 if name.endswith(".bias") or is_gemma else 1.0
                    parameter.copy_(center + 0.2 * torch.randn_like(parameter))
                else:
                    # Wide enough that the logits differ clearly between tokens.
                    parameter.copy_(torch.randn_like(parameter) * (2.0 / parameter.shape[-1] ** 0.5))
    return model


def write_tiny_model(
    directory: Path, architecture: str, seed: int = 0, tokenizer: bool = True, **overrides: Any
) -> None:
    """Writes config.json, model.safetensors, generation_config.json and, if asked, tokenizer.json."""
    model = make_tiny_model(architecture, seed, **overrides)
    model.save_pretrained(directory)
    if tokenizer:
        write_byte_tokenizer(directory, model.config.vocab_size)


def write_byte_tokenizer(directory: Path, vocab_size: int) -> None:
    """Writes a byte-level BPE tokenizer with the `tokenizers` library. The tokens are the 256 bytes, ChatML's
    special tokens, and as many merges as fit into `vocab_size`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(specials) + len(letters):
        raise ValueError(
            f"a byte-level vocabulary needs {len(specials) + len(letters)} ids, got {vocab_size}"
        )
    vocab = {token: index for index, token in enumerate(specials + letters)}
    merges = []
    for pair in [
        ("t", "h"),
        ("i", "n"),
        ("Ġ", "th"),
        ("Ġ", "a"),
        ("e", "r"),
        ("Ġth", "e"),
        ("1", "2"),
        ("0", "0"),
    ]:
        if len(vocab) < vocab_size:
            merges.append(pair)
            vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # The regex of Qwen2 and Qwen3.
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHATML
    fast.save_pretrained(directory)


CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
