"""The conformance suite: FlashInfer itself where there is a GPU, else the stand-in, which tells a wrong plan."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from mla_standin import OFFER as STANDIN

from headstock.testing import MLAConformance
from headstock_flashinfer_mla import OFFER


class TestFlashInferMLA(MLAConformance):
    backend = OFFER if torch.cuda.is_available() and find_spec("flashinfer") else STANDIN
