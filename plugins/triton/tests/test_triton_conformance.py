"""The conformance suite: on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import torch

from headstock.testing import AttentionConformance
from headstock_triton import INTERPRETED, OFFER


class TestTriton(AttentionConformance):
    backend = OFFER if torch.cuda.is_available() else INTERPRETED
