"""A platform "cpu" for verl. verl has none: without an accelerator it falls back to CUDA's, whose calls fail.
Import this module before the modules of verl that ask for the platform."""

from __future__ import annotations

import os
import resource
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA


class _CPUModule(ModuleType):
    """torch.cpu with the functions of torch.cuda that verl's workers call. Memory: resident bytes of the
    process."""

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    @staticmethod
    def empty_cache() -> None: ...

    @staticmethod
    def get_device_name() -> str:
        return "CPU"

    @staticmethod
    def memory_allocated() -> int:
        return psutil.Process().memory_info().rss

    @staticmethod
    def max_memory_allocated() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @staticmethod
    def mem_get_info() -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformCUDA):
    """Chosen by VERL_PLATFORM=cpu, or by VERL_ENGINE_DEVICE=cpu if verl finds no accelerator."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CPUModule("cpu")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.getenv("VERL_ENGINE_DEVICE") == "cpu"

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def communication_backend_name(self) -> str:
        return "gloo"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...
