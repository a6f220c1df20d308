"""Times one gradient step of a peer on a rollout file and prints one line of JSON.

Peers:
  dense        transformers' Qwen3, one sequence at a time
  dense_ckpt   the same with gradient checkpointing
  dta          the engine of AReaL's branch feat/dta
  flex_packed  sequences packed into passes of at most --block tokens, with FlexAttention's masks
  flex_tree    prefix trees of at most --block tokens, packed as in AReaL's tree training, with these masks

For `dta`, AREAL_DTA_DIR names the folder with areal/experimental/dta. From AReaL's other modules, the engine
needs only a logger and the gathering of log-probabilities; this script provides both. The loss is the plain
policy gradient over all trained tokens, which every trainer supports. Weights are random, from a seed. They
can be saved for Bough (--save-model), as can gradients (--grads). With --device cuda, the script also reports
the peak of PyTorch's allocator above the weights.
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

# hidden size, layers, query heads, key/value heads, head size, feed-forward width
SHAPES = {
    "tiny": (64, 2, 4, 2, 32, 128),
    "small": (512, 8, 8, 4, 64, 1536),
    "0.6b": (1024, 28, 16, 8, 128, 3072),
    "1.7b": (2048, 28, 16, 8, 128, 6144),
    "8b_8_layers": (4096, 8, 32, 8, 128, 12288),
}
HEAD_ROWS = 1024  # rows of logits that a packed pass holds at once


def make_model(shape, dtype, vocab, device="cpu"):
    """Configuration, and a model with a tied lm_head. Weights are sampled on the device from seed 0."""
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
    with torch.device(device):
        return config, Qwen3ForCausalLM(config).to(dtype)


def policy_gradient(log_probs, mask, advantage, trained):
    return -(advantage * log_probs * mask).sum() / trained


def count_trained(rows):
    return sum(sum(row["loss_mask"][1:]) for row in rows)


def target_mask(row):
    """The loss mask per target. A sequence's first token is not a target."""
    return torch.tensor(row["loss_mask"][1:], dtype=torch.float)


def step_dense(model, rows, checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    trained = count_trained(rows)
    total = 0.0
    for row in rows:
        tokens_ST = torch.tensor(row["input_ids"], device=model.device)[None]
        logits_TV = model(tokens_ST, use_cache=False).logits[0, :-1].float()
        log_probs_T = -F.cross_entropy(logits_TV, tokens_ST[0, 1:], reduction="none")
        mask_T = target_mask(row).to(model.device)
        loss = policy_gradient(log_probs_T, mask_T, row["advantage"], trained)
        loss.backward()
        total += loss.item()
    if checkpointing:
        model.gradient_checkpointing_disable()
    return total


def packs_of_trees(rows, capacity):
    """Lists of rows, in lexicographic order, whose prefix tree has at most `capacity` tokens."""
    packs, size, last = [], capacity, []
    for row in sorted(rows, key=lambda row: row["input_ids"]):
        tokens = row["input_ids"]
        shared = len(os.path.commonprefix([last, tokens]))
        if size + len(tokens) - shared > capacity:
            packs.append([])
            size, shared = 0, 0
        packs[-1].append(row)
        size, last = size + len(tokens) - shared, tokens
    return packs


def packs_of_sequences(rows, capacity):
    """Lists of rows of at most `capacity` tokens, packed first-fit, longest row first."""
    packs = []
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        length = len(row["input_ids"])
        room = next((p for p in packs if sum(len(r["input_ids"]) for r in p) + length <= capacity), None)
        if room is None:
            packs.append(room := [])
        room.append(row)
    return packs


def lay_out(rows, shares):
    """A pack's tokens in pre-order: ids, depths, subtree ends, and the token indices of each row."""
    ids, depths, ends, paths = [], [], [], []
    for row in rows:
        tokens, before = row["input_ids"], paths[-1] if paths else []
        shared = 0
        while shares and shared < min(len(before), len(tokens)) and ids[before[shared]] == tokens[shared]:
            shared += 1
        paths.append(before[:shared] + list(range(len(ids), len(ids) + len(tokens) - shared)))
        ids += tokens[shared:]
        depths += range(shared, len(tokens))
        ends += [0] * (len(tokens) - shared)
        for number in paths[-1]:
            ends[number] = len(ids)
    return ids, depths, ends, paths


def use_flex_attention(model):
    """Attention with `model.flex_mask`: compiled FlexAttention. SDPA on a CPU, where that has no backward."""
    from torch.nn.attention.flex_attention import flex_attention
    from transformers import AttentionInterface

    attend = torch.compile(flex_attention, dynamic=True) if model.device.type == "cuda" else None

    def forward(_module, q, k, v, _mask, scaling=None, **_):
        if attend:
            out = attend(q, k, v, block_mask=model.flex_mask, scale=scaling, enable_gqa=True)
        else:
            mask = {"attn_mask": model.flex_mask, "scale": scaling}
            out = F.scaled_dot_product_attention(q, k, v, **mask, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("bench_flex", forward)
    model.config._attn_implementation = "bench_flex"


def step_flex(model, rows, capacity, shares):
    from torch.nn.attention.flex_attention import create_block_mask, create_mask
    from torch.utils.checkpoint import checkpoint

    longest = max(len(row["input_ids"]) for row in rows)
    if longest > capacity:
        raise SystemExit(
            f"--block {capacity}: a pass has whole sequences, and the longest has {longest} tokens"
        )
    trained = count_trained(rows)
    if model.config._attn_implementation != "bench_flex":
        use_flex_attention(model)

    def log_probs_of(hidden_RD, targets_R):
        return -F.cross_entropy(model.lm_head(hidden_RD).float(), targets_R, reduction="none")

    total = 0.0
    for pack in (packs_of_trees if shares else packs_of_sequences)(rows, capacity):
        ids, depths, ends, paths = lay_out(pack, shares)
        ids_T, depths_T, ends_T = (torch.tensor(x, device=model.device) for x in (ids, depths, ends))

        def sees(_batch, _head, query, key, ends_T=ends_T):
            return (key <= query) & (query < ends_T[key])

        make = create_block_mask if model.device.type == "cuda" else create_mask
        model.flex_mask = make(sees, None, None, len(ids), len(ids), device=model.device)
        hidden_TD = model.model(
            ids_T[None], position_ids=depths_T[None], attention_mask={"full_attention": None}, use_cache=False
        ).last_hidden_state[0]
        # A token's log-probability is computed once, from its parent. Its weight sums all rows that train it.
        weights, parents = [0.0] * len(ids), [0] * len(ids)
        for row, path in zip(pack, paths, strict=True):
            for i in range(1, len(path)):
                parents[path[i]] = path[i - 1]
                weights[path[i]] += row["loss_mask"][i] * row["advantage"]
        used = [number for number, weight in enumerate(weights) if weight]
        loss = hidden_TD.sum() * 0
        for begin in range(0, len(used), HEAD_ROWS):
            chunk_R = torch.tensor(used[begin : begin + HEAD_ROWS], device=model.device)
            parents_R = torch.tensor([parents[i] for i in chunk_R.tolist()], device=model.device)
            weights_R = torch.tensor([weights[i] for i in chunk_R.tolist()], device=model.device)
            log_probs_R = checkpoint(log_probs_of, hidden_TD[parents_R], ids_T[chunk_R], use_reentrant=False)
            loss = loss - (weights_R * log_probs_R).sum() / trained
        loss.backward()
        total += loss.item()
    return total


# Parameter names are AReaL's, because the engine passes arguments by name.
def gather_logprobs(logits, labels, **_):
    logits_STV = logits[:, : labels.shape[1]].float()
    losses = F.cross_entropy(logits_STV.flatten(0, 1), labels.flatten(), reduction="none")
    return -losses.view(labels.shape)


def gather_logprobs_entropy(logits, labels, **_):
    log_probs_STV = logits.float().log_softmax(-1)
    chosen_ST = log_probs_STV[:, : labels.shape[1]].gather(-1, labels[..., None]).squeeze(-1)
    return chosen_ST, -(log_probs_STV.exp() * log_probs_STV).sum(-1)


def import_dta():
    """The engine's two classes, imported without the rest of AReaL and its dependencies."""
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
    """The loss, and the seconds of building the trie, which are part of the step."""
    DTAEngine, TokenTrie = import_dta()
    trained = count_trained(rows)
    engine = DTAEngine(
        model_config=config,
        device=model.device,
        dtype=model.dtype,
        max_seq_len=max(len(row["input_ids"]) for row in rows),
    )

    def loss(log_probs, _entropies, attached):
        return policy_gradient(log_probs, attached["mask"], attached["advantage"], trained)

    started = time.perf_counter()
    attached = [{"mask": target_mask(row).to(model.device), "advantage": row["advantage"]} for row in rows]
    trie = TokenTrie([torch.tensor(row["input_ids"], device=model.device) for row in rows], attached)
    trie.backward_permute()
    trie_seconds = time.perf_counter() - started
    return engine.backward(model, trie, loss, block), trie_seconds


PEERS = ["dense", "dense_ckpt", "dta", "flex_packed", "flex_tree"]


def save_gradients(model, path):
    from safetensors.torch import save_file

    save_file({name: weight.grad.float().contiguous() for name, weight in model.named_parameters()}, path)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--model", choices=SHAPES, default="small", help="shape of the model (small)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument(
        "--lora-rank", type=int, default=0, help="rank of PEFT's adapter of all linear layers; 0: no adapter"
    )
    parser.add_argument("--block", type=int, default=2048, help="tokens of a pass of dta, flex_* (2048)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
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
    config, model = make_model(args.model, getattr(torch, args.dtype), args.vocab, args.device)
    on_gpu = torch.device(args.device).type == "cuda"
    at_rest = torch.cuda.memory_allocated() if on_gpu else 0
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
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        started = time.perf_counter()
        trie_seconds = 0.0
        if args.peer == "dta":
            loss, trie_seconds = step_dta(model, config, rows, args.block)
        elif args.peer.startswith("flex"):
            loss = step_flex(model, rows, args.block, args.peer == "flex_tree")
        else:
            loss = step_dense(model, rows, args.peer == "dense_ckpt")
        if on_gpu:
            torch.cuda.synchronize()
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
    if on_gpu:
        report["device"] = torch.cuda.get_device_name()
        report["peak_gpu_gb"] = round((torch.cuda.max_memory_allocated() - at_rest) / 2**30, 2)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
