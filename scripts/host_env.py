"""Environment variables that this machine needs before torch is loaded, and checks of its CPU features."""

import os

CPUID_LEAF_OF_AMX_TILES = 0x1D


def amx_is_half_virtualised(cpuinfo: str) -> bool:
    """True if the hypervisor shows AMX in the feature flags but hides CPUID leaf 0x1D, the tile description.

    oneDNN then configures the tiles with zeros and dies with SIGILL in bf16 matrix products.
    """
    level, has_amx = None, False
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "cpuid level" and level is None:
            level = int(value)
        elif key.strip() == "flags":
            has_amx = "amx_tile" in value.split()
            break
    return has_amx and level is not None and level < CPUID_LEAF_OF_AMX_TILES


def copies_bf16_to_fp32() -> bool:
    """Whether bf16 products are computed in fp32: generation and training differ by rounding only."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return "avx512dq" not in file.read(65536) or os.environ.get("BOUGH_MAX_ISA") in ("baseline", "avx2")


def is_batch_invariant() -> bool:
    """Whether fp32 log-probabilities are independent of the batch composition (docs/numerics.md)."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return " avx2 " in file.read(65536) and os.environ.get("BOUGH_MAX_ISA") != "baseline"


def host_environment() -> dict[str, str]:
    """Variables to set for every program that multiplies matrices. Empty if the machine needs none."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            broken = amx_is_half_virtualised(file.read(65536))
    except OSError:
        broken = False
    return {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"} if broken else {}
