"""The device a decision is for: what is here, found without torch, or a GPU that is only assumed."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

from headstock.cli.gpus import gpu
from headstock.errors import HeadstockError
from headstock.vocabulary import DEVICES, check_known

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute of the CUDA driver API


@dataclass(frozen=True, slots=True)
class Hardware:
    """A torch device type and, for a GPU, its compute capability as major × 10 + minor; `name` is for people.

    What is `assumed_only` need not be here, and nothing runs on it.
    """

    device: str
    compute_capability: int | None = None
    name: str = ""
    assumed_only: bool = False

    @classmethod
    def assumed(cls, name: str) -> Hardware:
        """A GPU that need not be here; HeadstockError for a name that is not in the table."""
        found = gpu(name)
        figures = f"{found.num_sms} SMs, {found.memory} GiB"
        return cls("cuda", found.compute_capability, f"{name} (assumed: {figures})", assumed_only=True)

    @classmethod
    def here(cls, device: str = "auto") -> Hardware:
        """The device called `device` as torch spells it, or for "auto" the first GPU, else the CPU.

        Raises HeadstockError for a GPU that is not here. The driver is asked instead of torch, whose import takes
        longer than everything else that an explanation does.
        """
        kind, index = parse_device(device)
        if kind not in ("auto", "cuda"):
            return cls(kind, name=kind)
        capability = _driver_capability(index)
        if capability is not None:
            return cls("cuda", capability, device if kind == "cuda" else "cuda")
        if kind == "auto":
            return cls("cpu", name="cpu")
        cure = "--device cpu, or headstock explain --assume-gpu h200"
        raise HeadstockError("no such GPU here", given=device, works="cpu", type=cure)

    def dtype(self, preferred: str) -> str:
        """What "auto" means on this device for a model in `preferred`: a CPU without bfloat16 units takes float32."""
        if self.device != "cpu" or preferred == "float32":
            return preferred
        return "bfloat16" if _cpu_flags() & {"avx512_bf16", "amx_bf16"} else "float32"


def parse_device(device: str) -> tuple[str, int]:
    """The type and index of a device as torch spells it, or "auto"; HeadstockError for another spelling."""
    match = re.fullmatch(r"auto|(?!auto:)([a-z]+)(?::(\d{1,3}))?", device, re.ASCII)
    if match is None:
        raise HeadstockError("unreadable device", given=device, works="auto, cpu, cuda, cuda:1")
    kind, index = match[1] or "auto", int(match[2] or 0)
    check_known("device", kind, ("auto", *DEVICES))
    if kind == "cpu" and index:
        raise HeadstockError("there is one CPU", given=device, works="cpu")
    return kind, index


def readable_device(device: str) -> str:
    """`device` itself; HeadstockError where it is none."""
    parse_device(device)
    return device


def _driver_capability(index: int) -> int | None:
    """The compute capability of the GPU numbered `index`, None where there is none or no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), index)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), COMPUTE_CAPABILITY_MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), COMPUTE_CAPABILITY_MINOR, device)
    )
    return None if failed else major.value * 10 + minor.value


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())
