"""Runs test files in another Python environment (scripts/setup_venv NAME), in one process. tests/tinker and
tests/python/test_verl.py report each of their tests as a test of their own."""

import ast
import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def names_of(files: list[Path]) -> list[str]:
    """The test functions of the files."""
    return [
        node.name
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def set_up(environment: str) -> None:
    subprocess.run([ROOT / "scripts" / "setup_venv", environment], check=True, timeout=600)


def run_cases(
    environment: str,
    files: list[Path],
    folder: Path,
    *,
    fixtures: str,
    variables: dict[str, str],
    timeout: float,
) -> dict[str, list[str]]:
    """The failures of each test, by the test's name. fixtures: the module that pytest loads as a plug-in."""
    report = folder / "report.xml"
    python = ROOT / f".venv-{environment}" / "bin" / "python"
    command = [python, "-m", "pytest", "-c", os.devnull, "--noconftest", f"--rootdir={folder}", "-q"]
    command += ["-p", "no:cacheprovider", "-p", fixtures, "--durations=8", "--tb=short"]
    command += [f"--junitxml={report}", *files]
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
