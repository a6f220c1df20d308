#!/usr/bin/env python3
"""Times the CUDA kernels at models' shapes, compared with the GPU's ceilings and with torch's kernels.
Needs only torch and the libraries of a build or a bundle.

ceilings   an 8192-cubed bf16 product and a copy of 1 GiB: the peaks in the tables below
products   one layer's matrices at several numbers of tokens: forward, and backward with both gradients
attention  a chain of tokens, and a group of 8 responses after one prompt, forward and backward, compared with
           torch's cuDNN and FlashAttention kernels on the same chain (these kernels do not support trees)
head       logits, log-probabilities and their gradients in one chunk of rows

Times come from CUDA events: medians of --repeat interleaved runs. --device cpu tests this script on a CPU.
"""

import argparse
import contextlib
import json
import math
import statistics
import time
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {  # hidden size, heads, key/value heads, head size, feed-forward, vocabulary
    "qwen3-0.6b": (1024, 16, 8, 128, 3072, 151936),
    "qwen3-1.7b": (2048, 16, 8, 128, 6144, 151936),
    "qwen3-8b": (4096, 32, 8, 128, 12288, 151936),
}
TINY_SHAPES = {"tiny": (64, 4, 2, 16, 128, 320)}


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n".join(__doc__.splitlines()[3:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--libraries", type=Path, default=ROOT / "build/lib", help="folder of Bough's libraries"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--out", type=Path, help="file for the results, one JSON object")
    return parser.parse_args()


class Clock:
    """Seconds of device time. On a GPU, CUDA events measure them."""

    def __init__(self, device):
        self.device = device

    def seconds(self, work, repeat):
        work()
        times = []
        for _ in range(repeat):
            if self.device == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                work()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e-3)
            else:
                start = time.perf_counter()
                work()
                times.append(time.perf_counter() - start)
        return statistics.median(times)


def random(device, *shape):
    return torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.1


def ceilings(args, clock, small):
    n = 256 if small else 8192
    a, b = random(args.device, n, n), random(args.device, n, n)
    size = (1 << 20) if small else (1 << 30)
    source = torch.empty(size, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    return {
        "product_flops_per_second": 2 * n**3 / clock.seconds(lambda: a @ b, args.repeat),
        "copy_bytes_per_second": 2 * size / clock.seconds(lambda: target.copy_(source), args.repeat),
    }


def products(args, clock, shape, tokens):
    width, heads, kv_heads, head_dim, feed_forward, _ = shape
    matrices = [
        (width, (heads + 2 * kv_heads) * head_dim),
        (heads * head_dim, width),
        (width, 2 * feed_forward),
        (feed_forward, width),
    ]
    forward = backward = flops = 0
    for inputs, outputs in matrices:
        x, w, d_y = (
            random(args.device, tokens, inputs),
            random(args.device, outputs, inputs),
            random(args.device, tokens, outputs),
        )
        gradient = torch.zeros(outputs, inputs, device=args.device)

        def run_backward(x=x, w=w, d_y=d_y, gradient=gradient):
            torch.ops.bough.matrix_product(d_y, w, None, None)
            torch.ops.bough.add_matrix_product_(gradient, d_y.t(), x)

        forward += clock.seconds(
            lambda x=x, w=w: torch.ops.bough.matrix_product(x, w.t(), None, None), args.repeat
        )
        backward += clock.seconds(run_backward, args.repeat)
        flops += 2 * tokens * inputs * outputs
    return {"forward": flops / forward, "backward": 2 * flops / backward}


def ends_of(args, tokens, prompt):
    """Per token, the end of the tokens that see it, for a chain or for 8 responses after a prompt."""
    response = (tokens - prompt) // 8 if prompt else tokens
    ends = [
        tokens if i < prompt else min(tokens, prompt + ((i - prompt) // response + 1) * response)
        for i in range(tokens)
    ]
    return torch.tensor(ends, dtype=torch.int32, device=args.device)


def visible_pairs(tokens, prompt):
    response = (tokens - prompt) // 8 if prompt else tokens
    responses = (tokens - prompt) / response
    return prompt * (prompt + 1) / 2 + responses * (response * prompt + response * (response + 1) / 2)


def attention(args, clock, shape, tokens):
    _, heads, kv_heads, head_dim, _, _ = shape
    q, d_o = random(args.device, tokens, heads, head_dim), random(args.device, tokens, heads, head_dim)
    k, v = random(args.device, tokens, kv_heads, head_dim), random(args.device, tokens, kv_heads, head_dim)
    stack = k[:0]
    d_stack = torch.zeros(0, kv_heads, head_dim, device=args.device)
    scale = 1 / math.sqrt(head_dim)
    result = {}
    for kind, prompt in {"chain": 0, "group": tokens // 2}.items():
        ends = ends_of(args, tokens, prompt)
        spans = torch.ops.bough.key_spans(ends.cpu(), 0).to(args.device)
        flops = 4 * heads * head_dim * visible_pairs(tokens, prompt)

        def run_forward(ends=ends, spans=spans):
            return torch.ops.bough.tree_attention_forward(q, k, v, stack, stack, ends, spans, scale)

        o, lse = run_forward()

        def run_backward(ends=ends, spans=spans, o=o, lse=lse):
            torch.ops.bough.tree_attention_backward(
                d_o, q, k, v, stack, stack, ends, spans, o, lse, scale, d_stack, d_stack
            )

        result[kind] = {
            "forward": flops / clock.seconds(run_forward, args.repeat),
            "backward": 2.5 * flops / clock.seconds(run_backward, args.repeat),
        }
    flops = 4 * heads * head_dim * visible_pairs(tokens, 0)
    for name, backend in {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
    }.items():
        with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
            result[name] = torch_attention(args, clock, q, k, v, d_o, flops)
    return result


def torch_attention(args, clock, q, k, v, d_o, flops):
    by_head = [x.transpose(0, 1).unsqueeze(0).detach().requires_grad_(True) for x in (q, k, v)]
    seed = d_o.transpose(0, 1).unsqueeze(0)

    def run_forward():
        return torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True)

    forward = clock.seconds(run_forward, args.repeat)
    out = run_forward()
    backward = clock.seconds(lambda: torch.autograd.grad(out, by_head, seed, retain_graph=True), args.repeat)
    return {"forward": flops / forward, "backward": 2.5 * flops / backward}


def head(args, clock, shape, rows):
    width, *_, vocab = shape
    hidden, weight = random(args.device, rows, width), random(args.device, vocab, width)
    gradient = torch.zeros(vocab, width, device=args.device)
    labels = torch.zeros(rows, dtype=torch.int64, device=args.device)
    seeds = torch.ones(rows, device=args.device)

    def run():
        logits = torch.ops.bough.matrix_product(hidden, weight.t(), None, None)
        _, lse, entropies = torch.ops.bough.log_prob_forward(logits, labels, 1.0)
        torch.ops.bough.log_prob_backward_(logits, labels, lse, entropies, seeds, seeds, 1.0)
        torch.ops.bough.add_matrix_product_(gradient, logits.t(), hidden)
        torch.ops.bough.matrix_product(logits, weight, None, None)

    return {"forward_and_backward": 6 * rows * width * vocab / clock.seconds(run, args.repeat)}


def main():
    args = parse_arguments()
    torch.ops.load_library(str(args.libraries / "libbough_kernels.so"))
    if args.device == "cuda":
        torch.ops.load_library(str(args.libraries / "libbough_cuda.so"))
    clock = Clock(args.device)
    small = args.device == "cpu"
    found = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "ceilings": ceilings(args, clock, small),
        "shapes": {},
    }
    peak = found["ceilings"]["product_flops_per_second"]
    copied = found["ceilings"]["copy_bytes_per_second"]
    print(f"{found['device']}: {peak / 1e12:.4g} TFLOP/s, {copied / 1e12:.4g} TB/s")
    for name, shape in (TINY_SHAPES if small else SHAPES).items():
        of_shape = found["shapes"][name] = {}
        for tokens in args.tokens:
            cells = {
                "products": products(args, clock, shape, tokens),
                **{f"attention {k}": v for k, v in attention(args, clock, shape, tokens).items()},
                "head": head(args, clock, shape, min(tokens, 4096)),
            }
            of_shape[tokens] = cells
            for what, rates in cells.items():
                text = "  ".join(
                    f"{side} {rate / 1e12:.4g} ({rate / peak:.0%})" for side, rate in rates.items()
                )
                print(f"{name}  {tokens} tokens  {what:<16}  TFLOP/s: {text}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
