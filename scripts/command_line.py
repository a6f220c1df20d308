"""Command lines of the scripts that measure."""

import argparse
import os
import subprocess

from host_env import host_environment


def parser_of(doc):
    """A parser with a docstring as help: its first line, and what follows the blank line after it."""
    lines = doc.splitlines()
    return argparse.ArgumentParser(
        description=lines[0],
        epilog="\n".join(lines[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run_bough(program, words, folder, **variables):
    """Runs `program WORDS` in a folder, with further environment variables. Returns its stdout. Ends the
    script with the command and its messages if it fails."""
    command = [str(program), *map(str, words)]
    environment = {**os.environ, **host_environment(), **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode} from\n  {' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout
