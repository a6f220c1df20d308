"""bough.verl in verl's environment (scripts/setup_venv verl): this file runs the files of verl_cases there
once, and reports each of their tests."""

import sys
from pathlib import Path

import pytest
from case_files import names_of, run_cases, set_up
from script_module import load_script

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted(Path(__file__).with_name("verl_cases").glob("*_cases.py"))
NAMES = names_of(CASES)
pytestmark = pytest.mark.skipif(sys.version_info >= (3, 13), reason="verl 0.9.1 needs Python below 3.13")


@pytest.fixture(scope="module")
def results(bough_program, tmp_path_factory):
    """The failures of each test of verl_cases, by the test's name. The plug-in is installed with
    the entry points of the wheel."""
    set_up("verl")
    folder = tmp_path_factory.mktemp("verl")
    info = folder / "bough-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bough\nVersion: 0\n")
    (info / "entry_points.txt").write_text(load_script("wheel").ENTRY_POINTS)
    variables = {
        "BOUGH_BUILD_DIR": str(bough_program.parents[1]),
        "PYTHONPATH": f"{ROOT / 'python'}:{folder}:{CASES[0].parent}",
        "VERL_ENGINE_DEVICE": "cpu",
    }
    return run_cases("verl", CASES, folder, fixtures="verl_fixtures", variables=variables, timeout=900)


@pytest.mark.parametrize("name", NAMES)
def test_in_verls_environment(results, name):
    assert results[name] == [], "\n".join(results[name])
