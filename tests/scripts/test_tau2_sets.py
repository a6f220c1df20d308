"""bench/step_vs_peers.py with and without the environment of tau2-bench."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import step_vs_peers  # noqa: E402
from tau2_sets import SETS as TAU2_SETS  # noqa: E402
from workload import SETS  # noqa: E402


def sets_of(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["step_vs_peers.py", *words])
    return step_vs_peers.parse_arguments().sets


def test_without_tau2s_environment_its_sets_are_left_out_with_the_remedy(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(step_vs_peers, "TAU2_PYTHON", tmp_path / "python")
    assert sets_of(monkeypatch) == list(SETS)
    said = capsys.readouterr().err
    assert all(name in said for name in TAU2_SETS) and "scripts/setup_venv tau2" in said
    with pytest.raises(SystemExit):
        sets_of(monkeypatch, "--sets", *TAU2_SETS)
    assert sets_of(monkeypatch, "--sets", "flat") == ["flat"]
    assert capsys.readouterr().err.endswith("--sets: none of them can be made here\n")


def test_with_tau2s_environment_its_sets_are_measured_but_not_in_a_smoke_test(monkeypatch):
    monkeypatch.setattr(step_vs_peers, "TAU2_PYTHON", Path(sys.executable))
    assert sets_of(monkeypatch) == [*SETS, *TAU2_SETS]
    assert sets_of(monkeypatch, "--quick") == list(SETS)
