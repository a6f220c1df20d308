"""Times vLLM's engine for CPUs: 16 prompts x 8 samples. Prints one line of JSON.

Prompts are random token ids, different in each run. Each prompt is one request with n = 8 and prefix caching,
so that vLLM needs to compute it only once. Every sample has exactly --new tokens. The first run is a warm-up
and does not count.
"""

import argparse
import json
import os
import statistics
import sys
import time

PROMPTS, SAMPLES, LARGEST_TOKEN = 16, 8, 4096


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt (32)")
    parser.add_argument("--new", type=int, default=64, help="tokens of a sample (64)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    # vLLM reads these when it is imported: GiB of KV cache, and the cores to which it binds its threads.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from vllm import LLM, SamplingParams

    engine = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.prompt + args.new,
        max_num_seqs=PROMPTS * SAMPLES,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
    )
    random = torch.Generator().manual_seed(0)
    sampling = SamplingParams(
        n=SAMPLES, temperature=1.0, max_tokens=args.new, ignore_eos=True, detokenize=False
    )
    seconds = []
    for _ in range(4):
        prompts_ST = torch.randint(5, LARGEST_TOKEN, (PROMPTS, args.prompt), generator=random).tolist()
        started = time.perf_counter()
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts_ST], sampling, use_tqdm=False
        )
        seconds.append(time.perf_counter() - started)
    new_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    if new_tokens != PROMPTS * SAMPLES * args.new:
        raise SystemExit(f"peer_vllm: {new_tokens} tokens, not {PROMPTS * SAMPLES * args.new}")
    median = statistics.median(seconds[1:])
    report = {
        "peer": "vllm",
        "dtype": args.dtype,
        "s": median,
        "new_tokens_per_s": round(new_tokens / median),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
