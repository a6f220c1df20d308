"""Times transformers' generate with its KV cache: 16 prompts x 8 samples. Prints one line of JSON.

The fastest of several batch sizes counts. Prompts are random token ids. Every sample has exactly --new
tokens.
"""

import argparse
import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

PROMPTS, SAMPLES, LARGEST_TOKEN = 16, 8, 4096


def generate_all(model, prompts_ST, batch, new_tokens):
    """Seconds to generate all samples, `batch` at a time."""
    started = time.perf_counter()
    with torch.no_grad():
        for part_ST in prompts_ST.split(batch):
            model.generate(
                part_ST,
                attention_mask=torch.ones_like(part_ST),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
                use_cache=True,
            )
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt (32)")
    parser.add_argument("--new", type=int, default=64, help="tokens of a sample (64)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--batches", default="32,128", help="batch sizes to try (32,128)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    random = torch.Generator().manual_seed(0)
    prompts_ST = torch.randint(5, LARGEST_TOKEN, (PROMPTS, args.prompt), generator=random)
    prompts_ST = prompts_ST.repeat_interleave(SAMPLES, 0)
    batches = [int(word) for word in args.batches.split(",")]
    seconds, batch = min((generate_all(model, prompts_ST, batch, args.new), batch) for batch in batches)
    report = {
        "peer": "transformers.generate",
        "prompt": args.prompt,
        "new": args.new,
        "dtype": args.dtype,
        "s": round(seconds, 2),
        "batch": batch,
        "new_tokens_per_s": round(PROMPTS * SAMPLES * args.new / seconds),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
