"""Runs test files in the environment of Tinker's clients (scripts/setup_venv tinker)."""

import ast
import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
CASES = Path(__file__).with_name("cases")


def names_of(files: list[Path]) -> list[str]:
    return [
        node.name
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def run_cases(files: list[Path], bough_program: Path, folder: Path, timeout: float) -> dict[str, list[str]]:
    """Runs the files in one process. Returns the failures of each test, by the test's name."""
    subprocess.run([ROOT / "scripts" / "setup_venv", "tinker"], check=True, timeout=600)
    variables = {
        "BOUGH_PROGRAM": str(bough_program),
        "PYTHONPATH": ":".join(map(str, [CASES, TESTS, TESTS / "serve", TESTS / "parity"])),
        "TINKER_API_KEY": "tml-dummy",
        "TINKER_TELEMETRY": "0",
    }
    report = folder / "report.xml"
    command = [ROOT / ".venv-tinker" / "bin" / "python", "-m", "pytest", "-c", os.devnull, "--noconftest"]
    command += [f"--rootdir={folder}", "-p", "no:cacheprovider", "-p", "tinker_fixtures", "-q"]
    command += ["--durations=8", f"--junitxml={report}", "--tb=short", *files]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=timeout
    )
    print(done.stdout)
    assert report.is_file(), done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = re.sub(r"\[.*", "", case.get("name"))
        bad = [child.text for child in case if child.tag in ("failure", "error", "skipped")]
        found.setdefault(name, []).extend(f"{case.get('name')}:\n{text}" for text in bad)
    assert found.keys() == set(names_of(files)), done.stdout + done.stderr
    return found
