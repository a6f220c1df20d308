"""The self-test of the CUDA kernels (src/cli/self_tests.h) on the emulated device, docs/cuda_emulation.md."""

import json
import os
import subprocess
from pathlib import Path

import pytest

WITH_PLAIN_KERNELS = ["tree_attention_forward", "tree_attention_backward", "paged_attention_"]
OTHERS = [
    "summarise_pages_",
    "choose_pages",
    "rms_norm_forward",
    "rms_norm_backward",
    "swiglu_forward",
    "swiglu_backward",
    "qk_norm_rotary_forward",
    "qk_norm_rotary_backward",
    "add_embedding_gradient_",
    "log_prob_forward",
    "log_prob_backward_",
    "draw_token",
    "adamw_",
    "sum_of_squares",
    "quantize_rows_",
    "quantized_product",
]
# Kernels that are left out, so that their replacements run.
PLAIN = WITH_PLAIN_KERNELS
REFERENCES = [*PLAIN, *(f"{kernel}/plain" for kernel in PLAIN), *OTHERS]


@pytest.fixture(scope="module", autouse=True)
def has_emulated_device(build_dir: Path):
    if "BOUGH_CUDA_EMULATION:BOOL=ON" not in (build_dir / "CMakeCache.txt").read_text():
        pytest.skip("this preset has no emulated device")


@pytest.mark.parametrize("left_out", [PLAIN, REFERENCES], ids=["plain", "references"])
def test_replacements_of_left_out_kernels_pass_the_same_tests(build_dir: Path, left_out: list[str]):
    done = subprocess.run(
        [
            build_dir / "cuda_emulation" / "kernels_test",
            "--gtest_filter=*CudaSelfTest*",
            "--gtest_brief=1",
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=600,
        check=False,
        env={**os.environ, "BOUGH_LEAVE_OUT_KERNELS": ",".join(left_out), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


class EmulatedBough:
    """The program on the emulated device, with a libcuda.so.1 that knows one GPU."""

    def __init__(self, folder: Path, build: Path):
        self.folder = folder
        self.program = build / "cuda_emulation" / "bough"
        source = folder / "cuda.c"
        source.write_text(
            "int cuInit(unsigned f) { return 0; }\n"
            "int cuDeviceGetCount(int* n) { *n = 1; return 0; }\n"
            "int cuDeviceGet(int* d, int i) { *d = i; return 0; }\n"
            "int cuDeviceGetName(char* name, int n, int d) {\n"
            '  __builtin_strcpy(name, "emulated H100");\n'
            "  return 0;\n"
            "}\n"
            "int cuDriverGetVersion(int* v) { *v = 13000; return 0; }\n"
        )
        library = folder / "libcuda.so.1"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        self.environment = {
            **os.environ,
            "BOUGH_EMULATED_CUDA": "1",
            "OMP_NUM_THREADS": "1",
            "LD_LIBRARY_PATH": str(folder),
            "BOUGH_CACHE": str(folder / "cache"),
        }

    def __call__(self, *arguments, timeout: float = 600, **variables: str):
        return subprocess.run(
            [self.program, *map(str, arguments)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            cwd=self.folder,
            env={**self.environment, **variables},
        )

    def results(self):
        return [json.loads(file.read_text()) for file in (self.folder / "cache").glob("self-test-*.json")]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory, build_dir: Path) -> EmulatedBough:
    return EmulatedBough(tmp_path_factory.mktemp("emulated"), build_dir)


@pytest.fixture
def rollout(emulated: EmulatedBough, tiny_models):
    """Runs `bough rollout` on the emulated device, with the environment variables that are given."""
    prompts = emulated.folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"input_ids": list(range(5, 40))}) + "\n")

    def run(device: str = "cuda", *settings: str, **variables: str):
        out = emulated.folder / f"{device}.jsonl"
        done = emulated(
            *("rollout", "--model", tiny_models("qwen3"), "--prompts", prompts, "--out", out),
            *("--device", device, "--dtype", "fp32", "--temperature", 0),
            *("--max-new-tokens", 6, "--kv-memory", "4MiB", *settings),
            **variables,
        )
        tokens = json.loads(out.read_text())["input_ids"] if done.returncode == 0 else None
        return done, tokens

    return run


def test_the_first_use_tests_every_kernel_and_later_ones_read_the_result(emulated: EmulatedBough, rollout):
    _, expected = rollout(device="cpu")
    assert emulated.results() == [], "no self-test on the CPU"
    first, tokens = rollout()
    assert first.returncode == 0, first.stderr
    assert "self-test of the kernels on emulated H100" in first.stderr
    assert tokens == expected
    # The emulated device has no FlashAttention, so exactly this kernel fails.
    (found,) = emulated.results()
    assert found["tested_for"]["gpu"] == "emulated H100"
    assert [each["kernel"] for each in found["result"]["faulty"]] == ["flash_segments"]
    assert found["result"]["num_tests"] > 20
    assert "left out kernels that are faulty on this GPU: flash_segments" in first.stderr
    second, tokens = rollout()
    assert "self-test of the kernels" not in second.stderr
    assert "left out kernels that are faulty on this GPU: flash_segments" in second.stderr
    assert tokens == expected

    report = emulated("doctor", "--json")
    assert [each["kernel"] for each in json.loads(report.stdout)["self_test"]["faulty"]] == ["flash_segments"]
    text = emulated("doctor").stdout
    assert "left out by the self-test" in text and "flash_segments" in text


def test_a_run_with_a_much_slower_replacement_is_refused_unless_allowed(emulated: EmulatedBough, rollout):
    if not emulated.results():
        rollout()
    (file,) = (emulated.folder / "cache").glob("self-test-*.json")
    untouched = file.read_text()
    changed = json.loads(untouched)
    for kernel in ("paged_attention_", "paged_attention_/plain"):
        changed["result"]["faulty"].append(
            {"kernel": kernel, "replacement": "its reference", "why": "crashed", "is_much_faster": True}
        )
    file.write_text(json.dumps(changed))
    try:
        refused, _ = rollout()
        assert refused.returncode == 2
        assert "paged_attention_ is faulty on this GPU: crashed" in refused.stderr
        assert "BOUGH_SELF_TEST=allow-slow" in refused.stderr
        allowed, tokens = rollout(BOUGH_SELF_TEST="allow-slow")
        assert allowed.returncode == 0, allowed.stderr
        assert "paged_attention_/plain (crashed), its reference runs instead" in allowed.stderr
        assert tokens == rollout(device="cpu")[1]
    finally:
        file.write_text(untouched)


def test_the_variables_are_checked(emulated: EmulatedBough, rollout):
    bad, _ = rollout(BOUGH_SELF_TEST="on")
    assert bad.returncode == 2
    assert "BOUGH_SELF_TEST: got 'on', expected run, allow-slow or off" in bad.stderr
    bad, _ = rollout(BOUGH_LEAVE_OUT_KERNELS="adamw")
    assert bad.returncode == 2
    assert "BOUGH_LEAVE_OUT_KERNELS: got 'adamw', which is no kernel" in bad.stderr
    assert "adamw_" in bad.stderr
    bad, _ = rollout(
        "cuda",
        "rollout.sparse.budget=64",
        BOUGH_SELF_TEST="off",
        BOUGH_LEAVE_OUT_KERNELS="paged_attention_,paged_attention_/plain",
    )
    assert bad.returncode == 2
    assert "needs the kernel paged_attention_, but it is left out" in bad.stderr
    off, tokens = rollout(BOUGH_SELF_TEST="off", BOUGH_CACHE=str(emulated.folder / "other"))
    assert off.returncode == 0, off.stderr
    assert "self-test" not in off.stderr
    assert not (emulated.folder / "other").exists()
    assert tokens == rollout(device="cpu")[1]
