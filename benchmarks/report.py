"""What every committed figure must say of itself: hardware, versions, command, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Where, with what, how and when this process measured."""
    packages = ("headstock", "torch", "transformers", "triton", "flashinfer-python", "pydantic", "typer")
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version for name in packages if (version := _version(name))},
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
