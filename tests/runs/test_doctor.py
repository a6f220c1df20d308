"""`bough doctor` on this machine: with and without a GPU, and with a driver that crashes or hangs."""

import shutil
import subprocess
import time

import pytest

STATES = {"ok", "warning", "missing", "not needed"}


def rows(result):
    assert result.json is not None, result
    return {row["what"]: row for row in result.json["checks"]}


def stand_in(folder, code):
    """A libcuda.so.1 whose cuInit runs `code`."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.fail("no C compiler: install gcc")
    source = folder / "cuda.c"
    source.write_text(f"#include <stdlib.h>\n#include <unistd.h>\nint cuInit(unsigned flags) {{ {code} }}\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


def test_every_row_has_a_state_and_a_remedy_where_something_is_to_do(bough):
    result = bough("doctor", "--json")
    assert result.returncode in (0, 1), result
    found = rows(result)
    for what in ("bough", "torch", "driver", "libbough_cuda.so", "libbough_nccl.so", "CPU", "host memory"):
        assert what in found
    for what in ("pinned memory", "/dev/shm", "open files", "disk: fileroot", "disk: cache"):
        assert what in found
    for what in ("python3", "bubblewrap", "MPI", "zstd"):
        assert what in found
    for row in found.values():
        assert row["state"] in STATES, row
        assert row["found"], row
        assert row["remedy"] or row["state"] in ("ok", "not needed"), row
    assert result.json["ok"] == (result.returncode == 0)
    assert result.json["ok"] == all(row["state"] != "missing" for row in found.values())
    assert result.json["build"]["torch"].startswith("2.11.")
    assert 0 < result.json["host_memory"]["available"] <= result.json["host_memory"]["limit"]


def test_without_a_gpu_nothing_of_it_is_needed(bough):
    result = bough("doctor", "--json")
    if result.json["driver"]["gpus"] or rows(result)["driver"]["state"] != "not needed":
        pytest.skip("this machine has a GPU")
    assert result.returncode == 0, result
    assert rows(result)["driver"]["found"] == "no NVIDIA GPU and no driver"
    assert rows(result)["libbough_nccl.so"]["state"] in ("ok", "not needed")


def test_the_text_has_the_same_rows(bough):
    text, found = bough("doctor"), rows(bough("doctor", "--json"))
    assert text.stderr == ""
    shown = [line for line in text.stdout.splitlines() if line and not line.lstrip().startswith("->")]
    assert len(shown) == len(found) + 1
    for line, row in zip(shown, found.values(), strict=False):
        assert line.startswith(row["state"]), line
        assert row["what"] in line
    missing = sum(row["state"] == "missing" for row in found.values())
    assert shown[-1].startswith(f"{missing} missing" if missing else "nothing is missing")


def test_a_wrong_variable_is_a_missing_part(bough):
    result = bough("doctor", "--json", env={"BOUGH_MAX_ISA": "avx3"})
    assert result.returncode == 1, result
    assert rows(result)["CPU"]["state"] == "missing"
    assert "avx3" in rows(result)["CPU"]["found"]


def test_a_limit_of_kernels_is_a_warning(bough):
    result = bough("doctor", "--json", env={"BOUGH_MAX_ISA": "baseline"})
    assert "kernels use baseline" in rows(result)["CPU"]["found"]


def test_a_cache_folder_that_cannot_be_made_is_named(bough, tmp_path):
    (tmp_path / "file").write_text("")
    result = bough("doctor", "--json", env={"BOUGH_CACHE": str(tmp_path / "file" / "cache")})
    assert rows(result)["disk: cache"]["state"] == "warning"
    assert "not writable" in rows(result)["disk: cache"]["found"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("abort();", "signal 6"),
        ("return 802;", "cuInit: error 802"),
        ("_exit(4);", "exit code 4"),
    ],
)
def test_a_broken_driver_is_a_finding(bough, tmp_path, code, words):
    result = bough("doctor", "--json", env=stand_in(tmp_path, code))
    assert result.returncode == 1, result
    assert rows(result)["CUDA"]["state"] == "missing"
    assert words in rows(result)["CUDA"]["found"]
    assert rows(result)["CUDA"]["remedy"]


def test_a_driver_that_hangs_is_a_finding_after_20_seconds(bough, tmp_path):
    begin = time.monotonic()
    result = bough("doctor", "--json", env=stand_in(tmp_path, "for (;;) pause();"), timeout=120)
    assert result.returncode == 1, result
    assert "did not end within 20 s" in rows(result)["CUDA"]["found"]
    assert rows(result)["libbough_cuda.so"]["state"] != "ok"
    assert time.monotonic() - begin < 100
