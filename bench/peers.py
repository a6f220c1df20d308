"""Shared code of the peer benchmarks: program options, running a measurement, table layout."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from command_line import add_bough, check_program, parser_of  # noqa: E402, F401
from host_env import host_environment  # noqa: E402

BENCH = ROOT / "bench"
PROGRAM = Path(sys.argv[0]).stem
TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
VOCAB = 4096
# bench/peer_step.py has the same shapes for the peers. The head size is at least 32: vLLM supports no smaller
# one on a CPU.
BOUGH_SHAPES = {
    "tiny": "--hidden-size 64 --layers 2 --heads 4 --kv-heads 2 --head-dim 32 --intermediate-size 128",
    "small": "--hidden-size 512 --layers 8 --heads 8 --kv-heads 4 --head-dim 64 --intermediate-size 1536",
}


def add_program_options(parser):
    """Adds --bough, --python and --threads."""
    add_bough(parser)
    peers = ROOT / ".venv-peers/bin/python"
    parser.add_argument("--python", type=Path, default=peers, help="Python that has the peers (.venv-peers)")
    parser.add_argument("--threads", type=int, default=2, help="threads of Bough and of the peers (2)")


def check_programs(args):
    check_program(args.bough)
    if not os.access(args.python, os.X_OK):
        raise SystemExit(f"{PROGRAM}: no Python at {args.python}: `make bench-peers` creates .venv-peers")


def init_model(bough, folder, shape):
    """Creates a Hugging Face directory of the given shape with random weights."""
    words = [bough, "init", folder, *BOUGH_SHAPES[shape].split(), "--vocab-size", VOCAB, "--tie"]
    run_json([*words, "--json"])


def peers_environment():
    """This process's environment, plus the variables that libtorch's libraries need on this host."""
    return {**os.environ, **host_environment()}


def say(text):
    print(text, file=sys.stderr, flush=True)


def run_json(command, environment=None):
    """The JSON object that the command prints last, with the process's peak resident size added.

    The command's stderr is shown only if the command fails.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen([str(word) for word in command], env=environment, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        code = process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        lines = out.read().decode().strip().splitlines()
        if code != 0 or not lines or not lines[-1].startswith("{"):
            raise SystemExit(
                f"{PROGRAM}: exit code {code} from\n  {' '.join(map(str, command))}\n"
                f"{err.read().decode()[-2000:]}"
            )
    return {**json.loads(lines[-1]), "peak_rss_bytes": usage.ru_maxrss * 1024}


def aligned(lines):
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )
