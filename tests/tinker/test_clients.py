"""`bough serve --train` with Tinker's SDK and cookbook. This file runs the files of cases/ in their
environment once, and reports each of their tests."""

import pytest
from case_files import names_of
from run_cases import CASES, run_cases

FILES = sorted(path for path in CASES.glob("*_cases.py") if not path.name.startswith("slow_"))


@pytest.fixture(scope="module")
def results(bough_program, tmp_path_factory):
    return run_cases(FILES, bough_program, tmp_path_factory.mktemp("tinker"), timeout=900)


@pytest.mark.parametrize("name", names_of(FILES))
def test_with_tinkers_clients(results, name):
    assert results[name] == [], "\n".join(results[name])
