"""What benchmarks beside peers share: where the yardstick is, how a measurement runs, how a table looks."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from host_env import host_environment  # noqa: E402

YARDSTICK = Path(os.environ.get("BOUGH_YARDSTICK", ROOT.parent / "shared/yardstick"))
PROGRAM = Path(sys.argv[0]).stem
TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def peers_environment():
    """This process's, with what libtorch's libraries need on this host."""
    return {**os.environ, **host_environment()}


def say(text):
    print(text, file=sys.stderr, flush=True)


def is_missing(script):
    """Says so on stdout where the yardstick lacks the script: then there is nothing to measure against."""
    if (YARDSTICK / script).is_file():
        return False
    print(f"{PROGRAM}: left out: no {script} in {YARDSTICK} (BOUGH_YARDSTICK names its folder)")
    return True


def run_json(command, environment=None):
    """The JSON object that the command prints last, with the process's peak resident size added.

    What the command says on stderr is shown only when it fails.
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
