"""The conformance suite: FlashInfer itself where there is a GPU, else the stand-in, which tells a wrong plan."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from standin import OFFER as STANDIN

from headstock.testing import AttentionConformance
from headstock_flashinfer import OFFER


class TestFlashInfer(AttentionConformance):
    backend = OFFER if torch.cuda.is_available() and find_spec("flashinfer") else STANDIN
