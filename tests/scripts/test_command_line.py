"""The scripts that measure wait for the program that they started."""

import signal
import subprocess
import sys
import textwrap

from conftest import ROOT

# Says that it has begun, and at SIGTERM writes a file after half a second, as a run writes its checkpoint.
CHILD = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.5)
    pathlib.Path("checkpoint").write_text("complete")
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
print("begun", flush=True)
time.sleep(60)
"""


def script(body):
    return f"import sys\nsys.path.insert(0, {str(ROOT / 'scripts')!r})\n" + textwrap.dedent(body)


def test_sigterm_waits_for_the_checkpoint_of_the_command(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    body = """
        from command_line import run_part
        run_part([sys.executable, "child.py"])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", script(body)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert (tmp_path / "checkpoint").read_text() == "complete"


def test_a_failed_command_is_named_with_its_log(tmp_path):
    body = """
        from pathlib import Path
        from command_line import run_part
        looks = []
        run_part([sys.executable, "-c", "pass"], watch=lambda: looks.append(1))
        assert looks, "watch is called last, also for a short command"
        run_part(["sh", "-c", "echo words; exit 3"], Path("part.log"))
    """
    done = subprocess.run([sys.executable, "-c", script(body)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "exit code 3 from sh -c echo words; exit 3; see part.log; the same command continues\n"
    )
    assert (tmp_path / "part.log").read_text() == "words\n"


def test_a_program_that_is_missing_is_named_with_the_remedy(tmp_path):
    body = """
        from command_line import add_bough, parser_of, run_bough
        parser = parser_of("A script.")
        add_bough(parser)
        run_bough(parser.parse_args(["--bough", "bin/bough"]).bough, ["init"], "/")
    """
    done = subprocess.run([sys.executable, "-c", script(body)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    remedy = "`make build` makes build/bin/bough; or set BOUGH"
    assert done.stderr == f"no program at {tmp_path}/bin/bough: {remedy}\n"
