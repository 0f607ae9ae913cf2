"""The machine that figures are of: its processor, its driver, and the packages that ran. Found without torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from headstock.offer import Candidate


class Machine(NamedTuple):
    """What a measurement depends on beside the software: the device, with its cores on a CPU, and its driver.

    The driver of a CPU is its operating system's kernel.
    """

    device: str
    driver: str

    @classmethod
    def here(cls, kind: str, index: int = 0, root: Path = Path("/")) -> Machine:
        """The device of torch's type `kind` and number `index`; `root` is where proc is mounted."""
        if kind == "cpu":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            return cls(f"{_cpu_name(root)} ({cores} cores)", f"{platform.system()} {platform.release()}")
        if kind == "cuda":
            return cls(_gpu_name(index) or kind, _gpu_driver(root))
        return cls(kind, "")


def packages(candidates: Iterable[Candidate]) -> dict[str, str]:
    """The versions of the host, of torch, of what brings each candidate, and of what that requires itself."""
    names = {"headstock", "torch"}
    for distribution in {each.distribution for each in candidates if each.distribution}:
        names.add(distribution)
        with suppress(metadata.PackageNotFoundError):
            lines = metadata.requires(distribution) or []
            names |= {match[0] for line in lines if "extra ==" not in line and (match := re.match(r"[\w.-]+", line))}
    return {name: found for name in sorted(names) if (found := version(name))}


def version(name: str) -> str | None:
    """The installed version of a distribution, None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Packages at another version, as "torch 2.12 → 2.13". One that is gone changes nothing about the others."""
    return [f"{name} {old} → {now[name]}" for name, old in before.items() if name in now and now[name] != old]


def _cpu_name(root: Path) -> str:
    with suppress(OSError):
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())
    return platform.processor() or platform.machine()


def _gpu_name(index: int) -> str:
    """The name that the CUDA driver gives its GPU numbered `index`, empty where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index)
    return "" if failed or driver.cuDeviceGetName(name, len(name), device) else name.value.decode()


def _gpu_driver(root: Path) -> str:
    """The version of the kernel's driver, empty where it does not tell."""
    with suppress(OSError):
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8")
        if match := re.search(r"\b\d+\.\d+(\.\d+)?\b", text):
            return match[0]
    return ""
