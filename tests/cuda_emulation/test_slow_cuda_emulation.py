"""All tests of src/kernels on the emulated device (docs/cuda_emulation.md), with repeated launches and the
race detector, and whether faults planted in the kernels are found."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulation_build import BUILD, ROOT, last_command, run_command

CASES = "*cuda:*Cuda*"
SHORT_CASES = CASES + ":-*OnLongPasses"
REPEATED = "300000"  # threads of the longest launch that is repeated
MEMORY = "8000000000"  # the references of long passes keep their scores in fp64


@pytest.fixture(scope="module", autouse=True)
def built():
    subprocess.run([ROOT / "scripts" / "build", "release", "cuda_emulation", "cuda_races"], check=True)


def run(program, cases, repeated="0", timeout=3600):
    return subprocess.run(
        [program, f"--gtest_filter={cases}", "--gtest_brief=1", "--gtest_fail_fast"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        env={
            **os.environ,
            "BOUGH_EMULATION_REPEAT": repeated,
            "BOUGH_EMULATED_MEMORY": MEMORY,
            "OMP_NUM_THREADS": "1",
        },
    )


@pytest.mark.parametrize("program", ["kernels_test", "train_test", "rollout_test"])
def test_every_case_passes(program):
    done = run(BUILD / "cuda_emulation" / program, CASES, timeout=9000)
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
    variant: str


TREE, PAGED = "tree_attention/tree_attention", "paged_attention/paged_attention"
CHOICE = "page_choice/page_choice_cuda.cu"
QUANTIZED = "quantized_product/quantized_product_cuda.cu"
NORM = "rms_norm/rms_norm_cuda.cu"
TREE_CASES = "CudaTreeAttention.MatchesTheReferenceInFp64"
PAGED_CASES = "*PagedAttentionOn*cuda"
NORM_CASES = "*RmsNormOn*cuda"
ASAN, RACES = "cuda_emulation", "cuda_races"
SYNC = "__syncthreads();"
ARRIVED = "  // this tile has arrived"


def fault(name, variant, cases, compiled, file, old, new="//"):
    return Fault(name, file, compiled, old, new, cases, variant)


def tree(name, variant, file, old, new="//"):
    return fault(name, variant, TREE_CASES, TREE + "_cuda.cu", TREE + file, old, new)


def paged(name, variant, file, old, new="//"):
    return fault(name, variant, PAGED_CASES, PAGED + "_cuda.cu", PAGED + file, old, new)


FAULTS = [
    tree("tree_forward_barrier", RACES, "_tiles.cuh", SYNC + ARRIVED),
    tree("tree_forward_wait", ASAN, "_tiles.cuh", "wait_for_copies();", ""),
    tree("tree_backward_barrier", RACES, "_backward_cuda.cuh", SYNC + ARRIVED),
    tree("tree_one_stage_barrier", RACES, "_tiles.cuh", SYNC + "  // all warps have read this tile"),
    tree(
        "tree_one_stage_backward_barrier",
        RACES,
        "_backward_cuda.cuh",
        SYNC + "  // all warps have read these queries",
    ),
    tree(
        "plain_tree_barrier", RACES, "_plain_cuda.cuh", SYNC + "  // all threads have read the previous tile"
    ),
    tree("plain_tree_warp_barrier", RACES, "_plain_cuda.cuh", "__syncwarp();\n", "\n"),
    paged("paged_join_barrier", RACES, "_tensor_cuda.cuh", SYNC + "  // all warps have read the last tile"),
    paged("paged_one_stage_barrier", RACES, "_tensor_cuda.cuh", SYNC + "  // all warps have read this tile"),
    paged("paged_wait", ASAN, "_tensor_cuda.cuh", "wait_for_copies();", ""),
    paged("paged_tile_barrier", RACES, "_tensor_cuda.cuh", SYNC + ARRIVED),
    paged("plain_paged_warp_barrier", RACES, "_cuda.cu", "__syncwarp();  // all lanes have read"),
    fault("block_sum_barrier", RACES, NORM_CASES, NORM, "common/cuda_kernel.cuh", SYNC + "  // a former sum"),
    fault(
        "page_choice_barrier",
        RACES,
        "CudaPageChoice.*",
        CHOICE,
        CHOICE,
        SYNC + "  // all threads have read the previous counts",
    ),
    fault(
        "quantized_row_barrier",
        RACES,
        "*QuantizedProductOn*cuda",
        QUANTIZED,
        QUANTIZED,
        "= most;\n    " + SYNC,  # a block has a previous row only from 65,536 rows on
        "= most;",
    ),
    fault(
        "off_by_one",
        ASAN,
        NORM_CASES,
        NORM,
        NORM,
        "d < width; d += step) {\n      A x_d[kPack];",
        "d <= width; d += step) {\n      A x_d[kPack];",
    ),
    fault(
        "uninitialised_read",
        ASAN,
        NORM_CASES,
        NORM,
        NORM,
        "store(sums + d, zeros);",
        "if (d > 0) store(sums + d, zeros);",
    ),
]


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted, tmp_path):
    folder = BUILD / planted.variant
    shutil.copytree(ROOT / "src" / "kernels", tmp_path / "src" / "kernels")
    path = tmp_path / "src" / "kernels" / planted.file
    text = path.read_text()
    assert text.count(planted.old) >= 1, f"{planted.file} has no {planted.old!r}; plant the fault elsewhere"
    path.write_text(text.replace(planted.old, planted.new, 1))

    sources = ROOT / "src"
    built = str(folder / "objects" / Path(planted.compiled).name) + ".o"
    object_file, library = str(tmp_path / "object.o"), str(tmp_path / "libbough_cuda.so")
    for target, output in ((built, object_file), (str(folder / "libbough_cuda.so"), library)):
        command = last_command(target)
        command = command.replace(f"-I{sources} ", f"-I{tmp_path}/src -I{sources} ")
        command = command.replace(f"-c {sources}/kernels/", f"-c {tmp_path}/src/kernels/")
        command = command.replace(f"-MF {built}.d", "-MF /dev/null")
        command = command.replace(f"-o {target}", f"-o {output}")
        for name in (built, os.path.relpath(built, BUILD)):
            command = command.replace(f" {name} ", f" {object_file} ")
        run_command(command)
    program = tmp_path / "kernels_test"
    shutil.copy(folder / "kernels_test", program)
    repeated = REPEATED if planted.variant == "cuda_emulation" else "0"
    done = run(program, planted.cases, repeated)
    assert done.returncode != 0, f"{planted.name} was not found:\n{done.stdout[-2000:]}"
