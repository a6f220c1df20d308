"""scripts/gpu_check with made-up parts: order, budget, an OUT that exists, and exit codes."""

import json
import os
import time
from pathlib import Path

import pytest
from script_module import load_script

ROOT = Path(__file__).resolve().parents[2]


class Fake:
    """gpu_check with parts that take no time. `now` is its clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("BOUGH_SELF_TEST", "")  # so that what gpu_check sets is undone after the test
        monkeypatch.delenv("BOUGH_SELF_TEST")
        self.module = load_script("gpu_check")
        self.now = 0.0
        self.ran: list[str] = []
        self.seconds: dict[str, float] = {}
        self.faults: dict[str, Exception] = {}
        self.out = folder / "out"
        self.programs = folder / "build"
        (self.programs / "test").mkdir(parents=True)
        (self.programs / "lib").mkdir()
        (self.programs / "test" / "kernels_test").touch()
        self.build("0123456789abcdef")
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.module.PARTS = {self.part(name): 10 for name in ("first", "second", "third")}

    def build(self, build_id: str) -> None:
        (self.programs / "lib" / "libbough_kernels.so").write_text(f"...bough build id {build_id}...")

    def part(self, name: str):
        def run(check):
            self.ran.append(name)
            for piece in range(2):
                if not check.has_time(20, f"piece {piece}"):
                    continue
                self.now += self.seconds.get(name, 1) / 2
                if name in self.faults:
                    raise self.faults[name]
                yield f"result {piece}"

        run.__name__ = name
        return run

    def __call__(self, *words: str) -> int:
        self.ran = []
        self.now = 0.0
        return self.module.main([str(self.out), "--programs", str(self.programs), *words])

    def states(self) -> dict[str, str]:
        parts = json.loads((self.out / "parts.json").read_text())["parts"]
        return {name: part["state"] for name, part in parts.items()}

    def report(self) -> str:
        return (self.out / "report.md").read_text()


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(tmp_path, monkeypatch)


def test_correctness_comes_before_speed_and_the_sanitizer_last():
    names = [part.__name__ for part in load_script("gpu_check").PARTS]
    wanted = ["opens", "ops", "generation", "training", "parity", "train", "decode", "steps", "sanitizer"]
    assert [name for name in names if name in wanted] == wanted
    assert names[-1] == "sanitizer" and names.index("kernels") < names.index("steps")


def test_kernels_that_the_self_test_left_out_keep_no_part_from_being_measured(check: Fake, monkeypatch):
    check("--parts", "first")
    assert os.environ["BOUGH_SELF_TEST"] == "allow-slow"
    monkeypatch.setenv("BOUGH_SELF_TEST", "off")
    check("--parts", "second")
    assert os.environ["BOUGH_SELF_TEST"] == "off"


def test_all_parts_run_in_order(check: Fake):
    assert check() == 0
    assert check.ran == ["first", "second", "third"]
    assert "| second | done | 1 |" in check.report() and "third: result 1" in check.report()


def test_a_part_that_fails_does_not_stop_the_others(check: Fake, capsys):
    check.faults = {"first": check.module.Wrong("no GPU"), "second": KeyError("flops")}
    assert check() == 1
    assert check.ran == ["first", "second", "third"]
    assert check.states() == {"first": "failed", "second": "failed", "third": "done"}
    assert "first: FAILED: no GPU; see first.log" in check.report()
    assert "KeyError: 'flops'" in check.report()
    assert "gpu_check: failed: first, second" in capsys.readouterr().err


def test_parts_that_are_done_are_not_repeated(check: Fake):
    check.faults = {"second": check.module.Wrong("out of memory")}
    assert check() == 1
    check.faults = {}
    assert check("--parts", "first") == 0
    assert check.ran == []
    assert check() == 0
    assert check.ran == ["second"]
    assert check("--again", "third") == 0
    assert check.ran == ["third"]
    assert check.states() == dict.fromkeys(("first", "second", "third"), "done")


def test_a_budget_leaves_out_what_does_not_fit_and_names_it(check: Fake, capsys):
    check.seconds = {"first": 50, "second": 50, "third": 50}
    assert check("--budget", "105") == 3
    assert check.ran == ["first", "second"]
    assert check.states() == {"first": "done", "second": "done", "third": "left out"}
    assert "third: LEFT OUT: needs 10 s or more, the budget has 5 s left" in check.report()
    assert "gpu_check: left out: third" in capsys.readouterr().err
    assert check() == 0
    assert check.ran == ["third"]


def test_a_part_is_shortened_to_the_budget(check: Fake):
    check.seconds = {"first": 50}
    assert check("--budget", "40", "--parts", "first") == 3
    assert check.states() == {"first": "left out"}
    assert "first: result 0" in check.report() and "first: LEFT OUT: piece 1" in check.report()


def test_a_command_cut_by_the_budget_is_no_failure_but_one_cut_by_its_own_limit_is(check: Fake):
    check.faults = {"first": check.module.OutOfTime("bough took longer")}
    assert check("--budget", "100", "--parts", "first") == 3
    assert "LEFT OUT: what follows, because bough took longer" in check.report()
    assert check("--parts", "first") == 1
    assert "FAILED: bough took longer" in check.report()


def test_results_of_another_build_are_not_mixed(check: Fake, capsys):
    assert check() == 0
    check.build("fedcba9876543210")
    assert check() == 2
    message = capsys.readouterr().err
    assert "build 0123456789abcdef" in message and "fedcba9876543210" in message and check.ran == []


def test_bad_use_is_refused(check: Fake):
    for words in (("--budget", "0"), ("--parts", "nothing"), ("--again", "nothing")):
        with pytest.raises(SystemExit) as ended:
            check(*words)
        assert ended.value.code == 2


def test_a_part_names_the_tests_that_failed(tmp_path):
    module = load_script("gpu_check")
    program = tmp_path / "build" / "test" / "train_test"
    program.parent.mkdir(parents=True)
    failure = {"failure": "x.cpp:1\nExpected: (a) <= (b), actual: 2 vs 1"}
    cases = [
        {"classname": "On", "name": "Holds/cuda", "result": "COMPLETED"},
        {"classname": "On", "name": "Fails/cuda", "result": "COMPLETED", "failures": [failure]},
    ]
    text = json.dumps({"testsuites": [{"testsuite": cases}]})
    program.write_text(f"""#!/bin/sh
for word; do case "$word" in --gtest_output=json:*) printf %s '{text}' > "${{word#*json:}}";; esac; done
exit 1
""")
    program.chmod(0o755)
    check = module.Check(tmp_path, tmp_path / "build")
    check.deadline = time.monotonic() + 60
    with (tmp_path / "log").open("w") as check.log:
        with pytest.raises(
            module.Wrong, match=r"1 of 2 tests failed: On.Fails/cuda: x.cpp:1\nExpected: \(a\)"
        ):
            check.tests("train_test", "*cuda*")
        program.write_text("#!/bin/sh\nexit 3\n")
        with pytest.raises(module.Wrong, match="exit code 3"):  # a crash, not the failures of the run before
            check.tests("train_test", "*cuda*")
