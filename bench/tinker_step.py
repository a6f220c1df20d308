#!/usr/bin/env python3
"""Times forward_backward of Tinker's SDK against `bough serve --train`, with trees and with plan=dense.

A call has the responses to one prompt. The two services have the same random model and get the calls in turn.
Prints the median seconds of each, their ratio, the ratio of the tokens that the two plans compute, and the
largest difference of log-probabilities. Needs the environment of scripts/setup_venv tinker:

  .venv-tinker/bin/python bench/tinker_step.py
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "serve")]
from command_line import add_bough  # noqa: E402
from host_env import host_environment  # noqa: E402

os.environ.update(host_environment())
os.environ.update({"TINKER_API_KEY": "tml-dummy", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"})


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_bough(parser)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: a random one")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of the prompt")
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="tokens of a response")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def write_model(folder: Path) -> Path:
    from tiny_models import write_tiny_model

    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
    write_tiny_model(folder, "qwen3", **sizes, num_attention_heads=6)
    return folder


def main() -> None:
    arguments = parse_arguments()
    from serve_util import Served

    import tinker
    from tinker import types

    draw = random.Random(0)
    prompt = [draw.randrange(3, 300) for _ in range(arguments.prompt)]
    data = []
    for _ in range(arguments.responses):
        tokens = prompt + [draw.randrange(3, 300) for _ in range(arguments.length)]
        zeros = [0.0] * (arguments.prompt - 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": zeros + [-5.0] * arguments.length,
            "advantages": zeros + [draw.gauss(0, 1)] * arguments.length,
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))

    threads = {"OMP_NUM_THREADS": str(os.cpu_count())}
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or write_model(Path(folder) / "model")
        seconds, values, services = {}, {}, {}
        try:
            for plan in ("auto", "dense"):
                settings = ["--train", f"folder={folder}/{plan}", f"plan={plan}", "--dtype", arguments.dtype]
                served = services[plan] = Served(arguments.bough, model, *settings, env=threads)
                client = tinker.ServiceClient(base_url=served.url)
                services[plan, "client"] = client.create_lora_training_client(base_model=served.name).result()
                seconds[plan] = []
            for turn in range(arguments.repeat + 1):  # the first turn warms up
                for plan in ("auto", "dense"):
                    start = time.perf_counter()
                    done = services[plan, "client"].forward_backward(data, "importance_sampling").result()
                    if turn > 0:
                        seconds[plan].append(time.perf_counter() - start)
                    values[plan] = [output["logprobs"].tolist() for output in done.loss_fn_outputs]
        finally:
            for plan in seconds:
                services[plan].stop()
    tree, dense = (statistics.median(seconds[plan]) for plan in ("auto", "dense"))
    work = arguments.responses * (arguments.prompt + arguments.length)
    result = {
        "tree_seconds": tree,
        "dense_seconds": dense,
        "ratio": dense / tree,
        "token_ratio": work / (arguments.prompt + arguments.responses * arguments.length),
        "largest_difference": max(
            abs(a - b)
            for left, right in zip(values["auto"], values["dense"], strict=True)
            for a, b in zip(left, right, strict=True)
        ),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<20} {value:.6g}")


if __name__ == "__main__":
    main()
