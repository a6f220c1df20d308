"""scripts/check_locks on a made-up tree: an access without the mutex is found, and the same access under the
mutex passes."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "scripts" / "check_locks"
HEADER = """#pragma once
#include "base/mutex.h"
namespace bough {
class Counter {
 public:
  void add(int n);
  void await(int n);

 private:
  void add_locked(int n) REQUIRES(mutex_) { total_ += n; }
  Mutex mutex_;
  CondVar changed_;
  int total_ GUARDED_BY(mutex_) = 0;
};
}  // namespace bough
"""
SOURCE = """#include "env/counter.h"
namespace bough {
void Counter::add(int n) {
  const MutexLock lock(mutex_);
  add_locked(n);
  changed_.notify_all();
}
void Counter::await(int n) {
  MutexLock lock(mutex_);
  while (total_ < n) changed_.wait(mutex_);
  lock.unlock();
  lock.lock();
  total_ = 0;
}
}  // namespace bough
"""
needs_clang = pytest.mark.skipif(
    shutil.which("clang++") is None, reason="needs clang++ (Debian package clang)"
)


@pytest.fixture
def check(tmp_path: Path):
    """Checks the tree with the given text of env/counter.cpp. Returns exit code and output."""

    def run(source: str) -> tuple[int, str]:
        files = {"env/counter.h": HEADER, "env/counter.cpp": source}
        # Neither of these files is checked: one includes torch through a header, the other is a test.
        files |= {"train/step.h": "#include <ATen/ATen.h>\n", "env/counter_test.cpp": "Mutex: no C++\n"}
        files["train/step.cpp"] = '#include "train/step.h"\n#include "base/mutex.h"\nMutex mutex;\n'
        files["base/mutex.h"] = (ROOT / "src/base/mutex.h").read_text()
        for name, text in files.items():
            path = tmp_path / "src" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command = [CHECK, "--root", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    return run


@needs_clang
def test_members_under_their_mutex_pass(check):
    assert check(SOURCE) == (0, "1 files, 0 findings\n")


@needs_clang
@pytest.mark.parametrize(
    ("removed", "finding"),
    [
        (
            "  const MutexLock lock(mutex_);\n",
            "calling function 'add_locked' requires holding mutex 'mutex_'",
        ),
        ("  lock.lock();\n", "writing variable 'total_' requires holding mutex 'mutex_'"),
    ],
)
def test_an_access_without_the_mutex_is_found(check, removed, finding):
    assert removed in SOURCE
    code, output = check(SOURCE.replace(removed, ""))
    assert code == 1
    assert f"error: {finding} exclusively" in output and output.endswith("1 files, 1 findings\n")


@needs_clang
def test_a_file_that_does_not_parse_is_no_pass(check):
    code, output = check(SOURCE + "}\n")
    assert code == 1 and "src/env/counter.cpp" in output


def test_without_clang_the_package_is_named(tmp_path):
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = subprocess.run(
        [CHECK], capture_output=True, text=True, check=False, env={**os.environ, "PATH": str(tmp_path)}
    )
    assert done.returncode == 1 and "install the Debian package clang" in done.stderr
