"""bough.verl in verl's environment (scripts/setup_venv verl): this file runs the files of verl_cases there
once, and reports each of their tests."""

import ast
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted(Path(__file__).with_name("verl_cases").glob("*_cases.py"))
NAMES = [
    node.name
    for path in CASES
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]
pytestmark = pytest.mark.skipif(sys.version_info >= (3, 13), reason="verl 0.9.1 needs Python below 3.13")


@pytest.fixture(scope="module")
def results(bough_program, tmp_path_factory):
    """The failures of each test of verl_cases, by the test's name. The plug-in is installed with
    the entry points of the wheel."""
    subprocess.run([ROOT / "scripts" / "setup_venv", "verl"], check=True, timeout=600)
    folder = tmp_path_factory.mktemp("verl")
    info = folder / "bough-0.dist-info"
    info.mkdir()
    loader = SourceFileLoader("wheel_script", str(ROOT / "scripts" / "wheel"))
    wheel = module_from_spec(spec_from_loader("wheel_script", loader))
    loader.exec_module(wheel)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bough\nVersion: 0\n")
    (info / "entry_points.txt").write_text(wheel.ENTRY_POINTS)
    variables = {
        "BOUGH_BUILD_DIR": str(bough_program.parents[1]),
        "PYTHONPATH": f"{ROOT / 'python'}:{folder}:{CASES[0].parent}",
        "VERL_ENGINE_DEVICE": "cpu",
    }
    report = folder / "report.xml"
    command = [ROOT / ".venv-verl" / "bin" / "python", "-m", "pytest", "-c", os.devnull, "--noconftest", "-q"]
    command += [f"--rootdir={folder}", "-p", "no:cacheprovider", "-p", "verl_fixtures"]
    command += [f"--junitxml={report}", "--tb=short", *CASES]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=900
    )
    assert report.is_file(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = re.sub(r"\[.*", "", case.get("name"))
        bad = [child.text for child in case if child.tag in ("failure", "error", "skipped")]
        found.setdefault(name, []).extend(f"{case.get('name')}:\n{text}" for text in bad)
    assert found.keys() == set(NAMES), done.stdout + done.stderr
    return found


@pytest.mark.parametrize("name", NAMES)
def test_in_verls_environment(results, name):
    assert results[name] == [], "\n".join(results[name])
