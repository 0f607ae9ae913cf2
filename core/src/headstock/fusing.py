"""Whether fused kernels run on a device: Triton's, on an NVIDIA GPU where they import, compile and launch."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Fusing(NamedTuple):
    """Whether a device runs fused kernels, and what is wrong where Triton is there and does not get one to run."""

    able: bool
    fault: str = ""


@cache
def fusing(device: torch.device) -> Fusing:
    """Tries a small kernel, once for each device: a compiler for what launches it may be missing until then."""
    if device.type != "cuda" or torch.version.hip is not None:
        return Fusing(False)
    try:
        from headstock.models.fused import Fused
    except ImportError:
        return Fusing(False)
    try:
        with torch.cuda.device(device):
            Fused().silu_gate(torch.zeros(1, 2, device=device))
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        return Fusing(False, f"no fused kernel runs on {device}, so decoding takes torch's own operations: {reason}")
    return Fusing(True)
