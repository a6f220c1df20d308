"""The long tests of `bough serve --train` with Tinker's SDK and cookbook (cases/slow_*_cases.py)."""

import pytest
from case_files import names_of
from run_cases import CASES, run_cases

FILES = sorted(CASES.glob("slow_*_cases.py"))


@pytest.fixture(scope="module")
def results(bough_program, tmp_path_factory):
    return run_cases(FILES, bough_program, tmp_path_factory.mktemp("tinker"), timeout=7200)


@pytest.mark.parametrize("name", names_of(FILES))
def test_with_tinkers_clients(results, name):
    assert results[name] == [], "\n".join(results[name])
