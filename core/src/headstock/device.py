"""Everything that knows a device: what it is, how much memory is free, when its work is done."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch

from headstock.errors import HeadstockError


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name` ("bfloat16", "float8_e4m3fn")."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        works = "float32, float16, bfloat16, float8_e4m3fn, float8_e5m2"
        raise HeadstockError("unknown dtype", given=name, works=works)
    return dtype


def zeroed(num_bytes: int, device: torch.device | str) -> torch.Tensor:
    """Zeroed memory, uint8 [num_bytes]. On a CPU it takes up memory only once written, page by page."""
    if torch.device(device).type != "cpu" or num_bytes == 0:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device and what negotiation and planning need to know of it.

    `compute_capability` is major × 10 + minor, None where there is none; `num_sms` is 0 where there are none.
    """

    torch: torch.device
    name: str
    compute_capability: int | None = None
    num_sms: int = 0

    @classmethod
    def open(cls, name: str = "auto") -> Device:
        """The device called `name` as torch spells it, or for "auto" the first GPU, else the CPU."""
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except RuntimeError:
            raise HeadstockError("unknown device", given=name, works="cpu, cuda, cuda:1") from None
        if device.type == "cpu":
            return cls(device, "CPU")
        if device.type == "cuda":
            if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
                raise HeadstockError("no such GPU here", given=name, works="cpu", type="--device cpu")
            found = torch.cuda.get_device_properties(device)
            return cls(device, found.name, found.major * 10 + found.minor, found.multi_processor_count)
        return cls(device, name)

    def free_memory(self) -> int:
        """Bytes that can still be had: what the driver reports, or the memory the system holds available."""
        if self.torch.type == "cuda":
            return torch.cuda.mem_get_info(self.torch)[0]
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                available = next(line for line in lines if line.startswith("MemAvailable:"))
            return int(available.split()[1]) * 1024
        except (OSError, StopIteration):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def synchronize(self) -> None:
        """Waits until the device has done all work issued so far."""
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)

    def default_dtype(self, preferred: str) -> str:
        """`preferred` where the device is fast in it, else float32: a CPU without bfloat16 units takes float32."""
        if self.torch.type == "cpu" and preferred != "float32":
            return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() and _native_bf16() else "float32"
        return preferred


def _native_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 itself instead of emulating it."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
