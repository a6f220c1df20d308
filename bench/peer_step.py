"""Times one gradient step of a peer on a rollout file and prints one line of JSON.

Peers: `dense`, transformers' Qwen3 one sequence after the other; `dense_ckpt`, the same with gradient
checkpointing; `dta`, the engine of AReaL's branch feat/dta. For the last, AREAL_DTA_DIR names the folder
that holds areal/experimental/dta; of AReaL's other modules the engine asks for a logger and for gathered
log-probabilities only, which are given here. The loss is the plain policy gradient over all trained tokens:
what every trainer has. Weights are random, from a seed, and can be saved for Bough (--save-model), as can
gradients (--grads).
"""

import argparse
import gc
import json
import logging
import os
import resource
import sys
import time
import types
from pathlib import Path

import torch
import torch.nn.functional as F

# hidden, layers, query heads, key/value heads, head, feed-forward
SHAPES = {
    "tiny": (64, 2, 4, 2, 32, 128),
    "small": (512, 8, 8, 4, 64, 1536),
    "0.6b": (1024, 28, 16, 8, 128, 3072),
}


def make_model(shape, dtype, vocab):
    """Configuration and model with a tied head and weights from seed 0."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, kv_heads, head_dim, feed_forward = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=feed_forward,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return config, Qwen3ForCausalLM(config).to(dtype)


def policy_gradient(log_probs, mask, advantage, trained):
    return -(advantage * log_probs * mask).sum() / trained


def count_trained(rows):
    return sum(sum(row["loss_mask"][1:]) for row in rows)


def target_mask(row):
    """By target: a sequence's first token is nobody's."""
    return torch.tensor(row["loss_mask"][1:], dtype=torch.float)


def step_dense(model, rows, checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    trained = count_trained(rows)
    total = 0.0
    for row in rows:
        tokens_ST = torch.tensor(row["input_ids"])[None]
        logits_TV = model(tokens_ST, use_cache=False).logits[0, :-1].float()
        log_probs_T = -F.cross_entropy(logits_TV, tokens_ST[0, 1:], reduction="none")
        loss = policy_gradient(log_probs_T, target_mask(row), row["advantage"], trained)
        loss.backward()
        total += loss.item()
    if checkpointing:
        model.gradient_checkpointing_disable()
    return total


# Names of parameters are AReaL's: the engine passes them by name.
def gather_logprobs(logits, labels, **_):
    logits_STV = logits[:, : labels.shape[1]].float()
    losses = F.cross_entropy(logits_STV.flatten(0, 1), labels.flatten(), reduction="none")
    return -losses.view(labels.shape)


def gather_logprobs_entropy(logits, labels, **_):
    log_probs_STV = logits.float().log_softmax(-1)
    chosen_ST = log_probs_STV[:, : labels.shape[1]].gather(-1, labels[..., None]).squeeze(-1)
    return chosen_ST, -(log_probs_STV.exp() * log_probs_STV).sum(-1)


def import_dta():
    """The engine's two classes, imported without the rest of AReaL and what it depends on."""
    sys.path.insert(0, os.environ["AREAL_DTA_DIR"])
    stand_ins = {
        "areal.utils.logging": {"getLogger": logging.getLogger},
        "areal.utils.functional": {
            "gather_logprobs": gather_logprobs,
            "gather_logprobs_entropy": gather_logprobs_entropy,
        },
    }
    for name, attributes in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
    from areal.experimental.dta.dta_engine import DTAEngine
    from areal.experimental.dta.token_trie import TokenTrie

    return DTAEngine, TokenTrie


def step_dta(model, config, rows, block):
    """The loss, and the seconds of building the trie, which count as part of the step."""
    DTAEngine, TokenTrie = import_dta()
    trained = count_trained(rows)
    engine = DTAEngine(
        model_config=config,
        device=torch.device("cpu"),
        dtype=model.dtype,
        max_seq_len=max(len(row["input_ids"]) for row in rows),
    )

    def loss(log_probs, _entropies, attached):
        return policy_gradient(log_probs, attached["mask"], attached["advantage"], trained)

    started = time.perf_counter()
    attached = [{"mask": target_mask(row), "advantage": row["advantage"]} for row in rows]
    trie = TokenTrie([torch.tensor(row["input_ids"]) for row in rows], attached)
    trie.backward_permute()
    trie_seconds = time.perf_counter() - started
    return engine.backward(model, trie, loss, block), trie_seconds


def save_gradients(model, path):
    from safetensors.torch import save_file

    save_file({name: weight.grad.float().contiguous() for name, weight in model.named_parameters()}, path)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--peer", choices=["dense", "dense_ckpt", "dta"], required=True)
    parser.add_argument("--model", choices=SHAPES, default="small", help="its shape (small)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument(
        "--lora-rank", type=int, default=0, help="of PEFT's adapter of all linear layers; 0: none"
    )
    parser.add_argument("--block", type=int, default=2048, help="tokens whose activations dta holds (2048)")
    parser.add_argument("--warm", type=int, default=1, help="uncounted steps before the timed one (1)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--grads", type=Path, help="write gradients here, as safetensors in fp32")
    parser.add_argument("--save-model", type=Path, help="write the model here, as a Hugging Face directory")
    args = parser.parse_args()
    if args.peer == "dta" and not os.environ.get("AREAL_DTA_DIR"):
        parser.error("--peer dta: AREAL_DTA_DIR names no checkout of AReaL's branch feat/dta")
    return args


def main():
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    config, model = make_model(args.model, getattr(torch, args.dtype), args.vocab)
    if args.save_model:
        model.save_pretrained(args.save_model)
    if args.lora_rank:
        import peft

        config_of_adapter = peft.LoraConfig(
            r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear"
        )
        model = peft.get_peft_model(model, config_of_adapter)
    with open(args.rollouts, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    for _ in range(args.warm + 1):
        model.zero_grad(set_to_none=True)
        gc.collect()
        started = time.perf_counter()
        trie_seconds = 0.0
        if args.peer == "dta":
            loss, trie_seconds = step_dta(model, config, rows, args.block)
        else:
            loss = step_dense(model, rows, args.peer == "dense_ckpt")
        seconds = time.perf_counter() - started
    if args.grads:
        save_gradients(model, args.grads)
    report = {
        "peer": args.peer,
        "model": args.model,
        "dtype": args.dtype,
        "s": round(seconds, 3),
        "trie_s": round(trie_seconds, 3),
        "loss": loss,
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
