"""What every committed figure must say of itself: hardware, versions, command, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstock.offer import Candidate


def environment() -> dict[str, Any]:
    """Where, with what, how and when this process measured."""
    packages = ("headstock", "torch", "transformers", "triton", "flashinfer-python", "pydantic", "typer")
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        **_gpu(),
        "python": platform.python_version(),
        "packages": {name: version for name in packages if (version := _version(name))},
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
    }


def field(modules: Sequence[str] | None) -> list[Candidate]:
    """The installed backends, or those of the modules named: sources that are not installed have no entry points."""
    from headstock.offer import Candidate
    from headstock.plugins import discover

    if not modules:
        return [each for each in discover() if each.usable]
    return [Candidate.of(offer) for module in modules for offer in import_module(module).attention_backends()]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpu() -> dict[str, str]:
    """The GPU, its driver and CUDA, where this process has loaded torch and there is one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    version = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\d+\.\d+(\.\d+)?", version.read_text(encoding="utf-8")) if version.exists() else None
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": driver[0] if driver else ""}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
