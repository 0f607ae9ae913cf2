"""Which of FlashInfer's wrappers serves a batch: a function of the spec and of a few facts about the batch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from headstock import BackendSpec, ForwardBatch
from headstock_flashinfer.choice import Choice, Prefill

Serving = Literal["decode", "paged", "ragged", "split", "cascade"]
"""decode: the decode wrapper. paged: the paged prefill wrapper. ragged: the ragged prefill wrapper. split: ragged over
the new tokens, paged over the prefix, merged. cascade: a paged wrapper for each shared level, merged with the rows' own
keys, which the wrapper of a batch without levels serves."""


class Facts(NamedTuple):
    """What of a batch decides: `query_len` is 0 in EXTEND; `new` tokens are cached in this step."""

    query_len: int
    causal: bool
    new: bool = True
    prefix: bool = True  # some row has keys from before this step
    short: bool = False  # some row has fewer keys than queries
    levels: int = 0
    mask: bool = False

    @classmethod
    def of(cls, batch: ForwardBatch) -> Facts:
        """Of a batch with exact host lengths. In a graph they hold for every replay."""
        lens, indptr = batch.seq_lens_cpu, batch.query_indptr_cpu
        assert lens is not None, "exact host lengths are declared"
        assert indptr is not None, "exact host lengths are declared"
        before = np.zeros(1) if batch.graph else lens.numpy() - np.diff(indptr.numpy())
        return cls(
            query_len=batch.query_len if batch.phase == "decode" else 0,
            causal=batch.causal,
            new=batch.out_cache_loc is not None,
            prefix=batch.graph is not None or bool(before.max() > 0),
            short=bool(before.min() < 0),
            levels=len(batch.shared_levels),
            mask=batch.query_mask is not None,
        )


def serving(spec: BackendSpec, choice: Choice, facts: Facts) -> Serving:
    """The wrappers that serve a batch with these facts.

    Levels are read row by row where a window or a mask would have to cross them, where a row's bits may not depend on
    its batch, and where log-sum-exp is asked for, which fa2 rounds. Decode of several tokens per row is causal in
    FlashInfer, and wants as many keys.
    """
    if spec.attention == "ragged":
        return "ragged"
    if facts.levels and spec.window is None and not (facts.mask or spec.batch_invariant or spec.lse):
        return "cascade"
    return own(choice, facts)


def own(choice: Choice, facts: Facts) -> Literal["decode", "paged", "split"]:
    """The wrappers for the rows' own keys in pages."""
    decodes = facts.query_len == 1 or (facts.query_len > 1 and facts.causal and not facts.short)
    if decodes and not facts.mask and choice.decode != "fa3":
        return "decode"
    if choice.extend == "split" and facts.causal and facts.new and not facts.mask and not facts.levels:
        return "split"
    return "paged"


def paged_kernel(choice: Choice, facts: Facts, phase: str) -> Prefill:
    """The kernel of the paged wrapper for the rows' own keys: fa2 takes masks, and splits the keys of short rows."""
    if facts.mask:
        return "fa2"
    if phase == "decode":
        return "fa3" if choice.decode == "fa3" else "fa2"
    return choice.prefill
