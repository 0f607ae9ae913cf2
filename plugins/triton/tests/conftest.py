"""Without a GPU the kernels are interpreted, which Triton must know before it first sees them."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
