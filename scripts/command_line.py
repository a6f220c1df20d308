"""Command lines of the scripts that measure."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from host_env import host_environment


def parser_of(doc):
    """A parser with a docstring as help: its first line, and what follows the blank line after it."""
    lines = doc.splitlines()
    return argparse.ArgumentParser(
        description=lines[0],
        epilog="\n".join(lines[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_bough(parser):
    """Adds --bough. The variable BOUGH overrides the default program."""
    built = Path(__file__).resolve().parent.parent / "build/bin/bough"
    parser.add_argument(
        "--bough",
        type=lambda text: Path(text).absolute(),  # programs run in other folders
        default=os.environ.get("BOUGH") or str(built),
        metavar="PROGRAM",
        help="the program ($BOUGH, else build/bin/bough)",
    )


def check_program(program):
    """Ends the script if `program` is a path and no executable file is there."""
    if os.sep in str(program) and not os.access(program, os.X_OK):
        raise SystemExit(f"no program at {program}: `make build` makes build/bin/bough; or set BOUGH")


def run_bough(program, words, folder, **variables):
    """Runs `program WORDS` in a folder, with further environment variables. Returns its stdout. Ends the
    script with the command and its messages if it fails."""
    command = [str(program), *map(str, words)]
    check_program(program)
    environment = {**os.environ, **host_environment(), **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode} from\n  {' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


def run_part(words, log=None, watch=None, folder=None, **variables):
    """Runs a command that a later call can continue, with further environment variables. stdout and stderr
    are appended to the file `log`. `watch` is called every second and last. SIGTERM and Ctrl-C end this
    script only after the command has ended by SIGTERM: `bough train` writes a checkpoint then."""
    words = [str(word) for word in words]
    check_program(words[0])
    environment = {**os.environ, **host_environment(), "OMP_WAIT_POLICY": "passive", **variables}
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with log.open("a") if log else contextlib.nullcontext() as file:
            process = subprocess.Popen(words, cwd=folder, env=environment, stdout=file, stderr=file)
            try:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(1 if watch else None)
                    if watch:
                        watch()
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
    finally:
        signal.signal(signal.SIGTERM, former)
    if process.returncode != 0:
        place = f"see {log}" if log else "its messages are above"
        raise SystemExit(
            f"exit code {process.returncode} from {' '.join(words)}; {place}; the same command continues"
        )
