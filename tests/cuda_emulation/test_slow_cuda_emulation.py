"""All tests of src/kernels on the emulated device (docs/cuda_emulation.md), with repeated launches and with the race
detector, and whether faults planted in the kernels are found."""

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = Path(os.environ.get("BOUGH_BUILD_DIR", ROOT / "build"))
NINJA = ROOT / ".venv" / "bin" / "ninja"
CASES = "*cuda:*Cuda*"
SHORT_CASES = CASES + ":-*OnLongPasses"
REPEATED = "300000"  # threads of the longest launch that is repeated


@pytest.fixture(scope="module", autouse=True)
def built():
    subprocess.run([ROOT / "scripts" / "build", "release", "cuda_emulation", "cuda_races"], check=True)


def run(program, cases, repeated="0", timeout=3600):
    return subprocess.run(
        [program, f"--gtest_filter={cases}", "--gtest_brief=1"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        env={**os.environ, "BOUGH_EMULATION_REPEAT": repeated, "OMP_NUM_THREADS": "1"},
    )


def test_every_case_passes():
    done = run(BUILD / "cuda_emulation" / "kernels_test", CASES, timeout=9000)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_other_orders_and_fills_give_the_same_bytes():
    done = run(BUILD / "cuda_emulation" / "kernels_test", SHORT_CASES, REPEATED, timeout=9000)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_no_kernel_has_a_race():
    done = run(BUILD / "cuda_races" / "kernels_test", SHORT_CASES, timeout=9000)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in a file that the object `compiled` includes. `cases` then fail in the variant."""

    name: str
    file: str
    compiled: str
    old: str
    new: str
    cases: str
    variant: str = "cuda_emulation"


TREE, PAGED = "tree_attention/tree_attention", "paged_attention/paged_attention"
TREE_CASES = "CudaTreeAttention.MatchesTheReferenceInFp64"
PAGED_CASES = "*PagedAttentionOn*cuda"
SUM_CASES = "*RmsNormOn*cuda"
ARRIVED = "      __syncthreads();  // this tile has arrived"

FAULTS = [
    Fault("tree_forward_barrier", TREE + "_tiles.cuh", TREE + "_cuda.cu", ARRIVED, "      //", TREE_CASES),
    Fault("tree_forward_wait", TREE + "_tiles.cuh", TREE + "_cuda.cu", "      wait_for_copies();", "", TREE_CASES),
    Fault("tree_backward_barrier", TREE + "_backward_cuda.cuh", TREE + "_cuda.cu",
          "    __syncthreads();  // this tile has arrived", "    //", TREE_CASES),
    Fault("plain_tree_barrier", TREE + "_plain_cuda.cuh", TREE + "_cuda.cu",
          "    __syncthreads();  // all threads have read the previous tile", "    //", TREE_CASES, "cuda_races"),
    Fault("plain_tree_warp_barrier", TREE + "_plain_cuda.cuh", TREE + "_cuda.cu", "    __syncwarp();\n", "\n",
          TREE_CASES, "cuda_races"),
    Fault("paged_join_barrier", PAGED + "_tensor_cuda.cuh", PAGED + "_cuda.cu",
          "  __syncthreads();  // all warps have read the last tile", "  //", PAGED_CASES, "cuda_races"),
    Fault("paged_wait", PAGED + "_tensor_cuda.cuh", PAGED + "_cuda.cu", "    wait_for_copies();", "", PAGED_CASES),
    Fault("paged_tile_barrier", PAGED + "_tensor_cuda.cuh", PAGED + "_cuda.cu",
          "    __syncthreads();  // this tile has arrived", "    //", PAGED_CASES),
    Fault("plain_paged_warp_barrier", PAGED + "_cuda.cu", PAGED + "_cuda.cu",
          "    __syncwarp();  // all lanes have read", "    //", PAGED_CASES, "cuda_races"),
    Fault("block_sum_barrier", "common/cuda_kernel.cuh", "rms_norm/rms_norm_cuda.cu",
          "  __syncthreads();  // a former sum", "  //", SUM_CASES, "cuda_races"),
    Fault("page_choice_barrier", "page_choice/page_choice_cuda.cu", "page_choice/page_choice_cuda.cu",
          "  __syncthreads();  // all threads have read the previous counts", "  //", "CudaPageChoice.*", "cuda_races"),
    Fault("quantized_row_barrier", "quantized_product/quantized_product_cuda.cu",
          "quantized_product/quantized_product_cuda.cu",
          "    __syncthreads();  // all threads have read the previous row's maxima", "    //",
          "*QuantizedProductOn*cuda", "cuda_races"),
    Fault("off_by_one", "rms_norm/rms_norm_cuda.cu", "rms_norm/rms_norm_cuda.cu",
          "for (int64_t d = first; d < width; d += step) {\n      A x_d[kPack];",
          "for (int64_t d = first; d <= width; d += step) {\n      A x_d[kPack];", SUM_CASES),
    Fault("uninitialised_read", "rms_norm/rms_norm_cuda.cu", "rms_norm/rms_norm_cuda.cu",
          "store(sums + d, zeros);", "if (d > 0) store(sums + d, zeros);", SUM_CASES),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, tmp_path):
    folder = BUILD / fault.variant
    shutil.copytree(ROOT / "src" / "kernels", tmp_path / "src" / "kernels")
    path = tmp_path / "src" / "kernels" / fault.file
    text = path.read_text()
    assert text.count(fault.old) >= 1, f"{fault.file} has no {fault.old!r}; plant the fault elsewhere"
    path.write_text(text.replace(fault.old, fault.new, 1))

    sources = ROOT / "src"
    built = str(folder / "objects" / Path(fault.compiled).name) + ".o"
    object_file, library = str(tmp_path / "object.o"), str(tmp_path / "libbough_cuda.so")
    for target, output in ((built, object_file), (str(folder / "libbough_cuda.so"), library)):
        command = last_command(target)
        command = command.replace(f"-I{sources} ", f"-I{tmp_path}/src -I{sources} ")
        command = command.replace(f"-c {sources}/kernels/", f"-c {tmp_path}/src/kernels/")
        command = command.replace(f"-MF {built}.d", "-MF /dev/null")
        command = command.replace(f"-o {target}", f"-o {output}")
        for name in (built, os.path.relpath(built, BUILD)):
            command = command.replace(f" {name} ", f" {object_file} ")
        done = subprocess.run(["bash", "-c", command], cwd=BUILD, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    program = tmp_path / "kernels_test"
    shutil.copy(folder / "kernels_test", program)
    repeated = REPEATED if fault.variant == "cuda_emulation" else "0"
    done = run(program, fault.cases, repeated)
    assert done.returncode != 0, f"{fault.name} was not found:\n{done.stdout[-2000:]}"
    print(fault.name, *[line for line in done.stderr.splitlines() if "emulation:" in line or "ERROR" in line][:1])


def last_command(target):
    """The command that builds a target, without ninja's changes of folder and of the list of headers."""
    listed = subprocess.run(
        [NINJA, "-C", BUILD, "-t", "commands", "-s", os.path.relpath(target, BUILD)],
        capture_output=True,
        text=True,
        check=True,
    )
    parts = listed.stdout.strip().splitlines()[-1].split(" && ")
    return next(part for part in parts if "clang" in shlex.split(part)[0] or "clang++" in part)
