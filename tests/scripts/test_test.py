"""scripts/test with made-up runners: what it counts, what it prints last, and how it ends."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from script_module import load_script

ROOT = Path(__file__).resolve().parents[2]


class Checkout:
    """A made-up checkout with a build folder. Its documents have no faults."""

    def __init__(self, root: Path):
        self.root = root
        self.programs = root / "build" / "test"
        self.programs.mkdir(parents=True)
        (root / "scripts").mkdir()
        self.documents("sys.exit(0)")

    def documents(self, code: str) -> None:
        (self.root / "scripts" / "check_docs").write_text(f"import sys\n{code}\n")

    def gtest(self, name: str, body: str, report: dict | None = None, build: str = "build") -> None:
        """Makes a program that writes `report` to the file of --gtest_output, then runs `body`."""
        program = self.root / build / "test" / f"{name}_test"
        program.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report) if report else ""
        program.write_text(
            f"#!{sys.executable}\nimport os, signal, sys, time\n"
            f"path = [a for a in sys.argv if a.startswith('--gtest_output=json:')]\n"
            f"if path and {text!r}: open(path[0].split(':', 1)[1], 'w').write({text!r})\n{body}\n"
        )
        program.chmod(0o755)

    def pytest(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        (self.root / "tests").mkdir(exist_ok=True)
        (self.root / "tests" / "pytest.ini").write_text("[pytest]\nmarkers = slow: slow\n")

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Returns the exit code, the last line, and everything that was printed."""
        done = subprocess.run(
            [ROOT / "scripts" / "test", "--root", self.root, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout.splitlines()[-1], done.stdout


def gtest_report(*results: str) -> dict:
    tests = []
    for index, result in enumerate(results):
        test = {"name": f"T{index}", "status": "RUN", "result": "COMPLETED"}
        if result == "failed":
            test["failures"] = [{"failure": "x_test.cpp:7\nExpected equality", "type": ""}]
        elif result == "skipped":
            test["result"] = "SKIPPED"
        elif result == "disabled":
            test |= {"status": "NOTRUN", "result": "SUPPRESSED"}
        tests.append(test)
    return {"testsuites": [{"name": "Suite", "testsuite": tests}]}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_sums_over_all_kinds_of_runners(checkout: Checkout):
    checkout.gtest("base", "", gtest_report("passed", "passed", "skipped", "disabled"))
    checkout.pytest(
        "tests/test_a.py",
        "import pytest\ndef test_1(): pass\ndef test_2(): pytest.skip()\n"
        "@pytest.mark.slow\ndef test_3(): assert 0\n",
    )
    checkout.pytest(
        "tests/parity/test_b.py",
        "import pytest\n@pytest.mark.parametrize('x', range(3))\ndef test_1(x): pass\n",
    )
    code, last, text = checkout.run()
    assert (code, last) == (0, "7 passed, 0 failed, 3 skipped"), text
    assert (checkout.root / "build/test-results/sum.txt").read_text() == last + "\n"
    for name in ("base_test", "pytest:tests ", "pytest:tests/parity", "check_docs"):
        assert f"ok    {name}" in text


def test_gates_and_sanitized_tests_run_on_request(checkout: Checkout):
    checkout.gtest("base", "", gtest_report("passed"))
    for script in ("lint", "check_locks"):
        path = checkout.root / "scripts" / script
        path.write_text("#!/bin/sh\necho $0 $*\n")
        path.chmod(0o755)
    code, last, text = checkout.run("--gates", "--sanitized")
    assert (code, last) == (1, "4 passed, 1 failed, 0 skipped"), text
    assert "FAIL  asan:base_test" in text, "build-asan/ does not exist"

    sanitized = "assert 'detect_leaks=1' in os.environ['ASAN_OPTIONS']"
    checkout.gtest("base", sanitized, gtest_report("passed"), build="build-asan")
    code, last, text = checkout.run("--gates", "--sanitized")
    assert (code, last) == (0, "5 passed, 0 failed, 0 skipped"), text
    assert "--layout" in (checkout.root / "build/test-results/layout.log").read_text()


def test_tests_on_the_emulated_device_are_counted(checkout: Checkout):
    body = "sys.exit(0 if 'cuda' in sys.argv[-1] and os.environ['BOUGH_EMULATION_REPEAT'] else 1)"
    checkout.gtest("kernels", body, gtest_report("passed", "passed"))
    build = checkout.root / "build"
    (build / "CMakeCache.txt").write_text("BOUGH_CUDA_EMULATION:BOOL=ON\n")
    status, last, text = checkout.run("cuda_emulation")
    assert (status, last) == (1, "0 passed, 3 failed, 0 skipped"), f"the programs are not built: {text}"
    (build / "cuda_emulation").mkdir()
    for name in ("train_test", "rollout_test"):
        shutil.copy(checkout.programs / "kernels_test", build / "cuda_emulation" / name)
    (checkout.programs / "kernels_test").rename(build / "cuda_emulation" / "kernels_test")
    status, last, text = checkout.run("cuda_emulation")
    assert (status, last) == (0, "6 passed, 0 failed, 0 skipped"), text


def test_goes_on_after_a_failure_and_shows_it(checkout: Checkout):
    checkout.gtest("base", "sys.exit(1)", gtest_report("failed", "passed"))
    checkout.gtest("tree", "", gtest_report("passed"))
    checkout.pytest("tests/test_a.py", "def test_1(): assert 3 == 4\n")
    checkout.documents("print('no such file'); sys.exit(1)")
    code, last, text = checkout.run()
    assert (code, last) == (1, "2 passed, 3 failed, 0 skipped"), text
    assert (
        "Suite.T0" in text
        and "Expected equality" in text
        and "assert 3 == 4" in text
        and "no such file" in text
    )


def test_a_death_by_signal_counts_the_tests_before_it_and_one_failure(checkout: Checkout):
    checkout.gtest(
        "base",
        "print('[ RUN      ] A.B\\n[       OK ] A.B (1 ms)\\n[ RUN      ] A/C.D/0', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)",
    )
    code, last, text = checkout.run()
    assert (code, last) == (1, "2 passed, 1 failed, 0 skipped")  # the document check passed too
    assert "died of SIGSEGV in A/C.D/0" in text


def test_an_exit_code_without_a_failed_test_is_a_failure(checkout: Checkout):
    checkout.gtest(
        "base", "print('LeakSanitizer: detected memory leaks'); sys.exit(23)", gtest_report("passed")
    )
    code, last, text = checkout.run("base")
    assert (code, last) == (1, "1 passed, 1 failed, 0 skipped")
    assert "exit code 23" in text and "detected memory leaks" in text


def test_a_hanging_runner_is_ended_with_its_children(checkout: Checkout):
    mark = checkout.root / "alive"
    checkout.gtest(
        "base", f"import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 4; touch {mark}'])\ntime.sleep(60)"
    )
    started = time.monotonic()
    code, last, text = checkout.run("--timeout", "1", "base")
    assert (code, last) == (1, "0 passed, 1 failed, 0 skipped") and "longer than 1 s" in text
    assert time.monotonic() - started < 30
    time.sleep(max(0.0, started + 6 - time.monotonic()))
    assert not mark.exists()


def test_nothing_to_run_is_a_failure(checkout: Checkout):
    code, last, text = checkout.run("--unit")
    assert (code, last) == (1, "0 passed, 1 failed, 0 skipped") and "make build" in text
    checkout.gtest("base", "", {"testsuites": []})
    code, last, text = checkout.run("--unit")
    assert (code, last) == (1, "0 passed, 1 failed, 0 skipped") and "ran no test" in text


def test_broken_python_test_files_are_failures(checkout: Checkout):
    checkout.pytest("tests/test_a.py", "import no_such_module\n")
    checkout.pytest(
        "tests/b/test_b.py",
        "import os, signal\ndef test_1(): pass\ndef test_2(): os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    code, last, _ = checkout.run("pytest")
    assert (code, last) == (1, "1 passed, 2 failed, 0 skipped")


def test_the_slow_suite_runs_what_is_slow_and_nothing_else(checkout: Checkout):
    checkout.gtest(
        "base",
        "if '--gtest_list_tests' in sys.argv: print('Suite.\\n  Slow1')\n"
        "else: assert os.environ['BOUGH_SLOW'] == '1' and '--gtest_filter=*Slow*' in sys.argv",
        gtest_report("passed"),
    )
    checkout.gtest("tree", "if '--gtest_list_tests' not in sys.argv: sys.exit(1)", gtest_report("failed"))
    checkout.pytest(
        "tests/test_a.py", "import pytest\ndef test_1(): assert 0\n@pytest.mark.slow\ndef test_3(): pass\n"
    )
    checkout.pytest("tests/b/test_b.py", "def test_1(): assert 0\n")
    code, last, text = checkout.run("--slow")
    assert (code, last) == (0, "2 passed, 0 failed, 0 skipped"), text


def test_instruction_sets_are_those_of_the_cpu():
    module = load_script("test")
    assert module.isas_of("flags\t: fpu sse2 avx2 rdrand\nbugs\t:") == ["baseline", "avx2"]
    assert module.isas_of("flags\t: sse2 avx2 avx512f avx512_bf16\n")[2:] == ["avx512", "avx512_bf16"]
