"""The conformance suite: on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import torch

from headstock.testing import AttentionConformance, MLAConformance
from headstock_triton import INTERPRETED, OFFER


class TestTriton(AttentionConformance):
    backend = OFFER if torch.cuda.is_available() else INTERPRETED
    kinds = ("paged", "ragged")


class TestTritonLatents(MLAConformance):
    backend = OFFER if torch.cuda.is_available() else INTERPRETED
    kinds = ("mla",)
    # what `attend` shares with `latent`, schedule, splits and merging, is tested above
    quick = (
        "*-of-*", "*-latent-*", "*-absorbs-*", "*-merges-*", "*-cascade-2", "*-query-mask", "*-non-causal", "*-cross",
        "*-matches-sinks", "*-large-logits", "*-float16", "*-scales-0.04", "*-unused-slots-*", "*-offsets-*",
        "decode-*-strides-*", "decode-*-heads-*", "*-mla-cached-batch", "*-head_dims-*", "decode-*-graph-replay",
        "decode-*-graph-replay-cascade-1",
    )  # fmt: skip
