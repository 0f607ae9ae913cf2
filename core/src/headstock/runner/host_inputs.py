"""What the host writes before a replay: the rows of one captured size, as numbers that a device then fetches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from headstock.backend import GraphBucket
from headstock.batch import Ints
from headstock.kv.mirror import Mirror
from headstock.runner.levels import Shared
from headstock.runner.static_levels import StaticLevels

Rows = Sequence[int] | Ints
"""A number for each row, or for each token."""
Sections = dict[str, slice]


def sections(bucket: GraphBucket, num_mirrors: int) -> Sections:
    """Where each part of what the host writes lies, "levels" last.

    `slots`, `lens` [B] and `ids` [B × n]; `changes` [mirrors, 2, B]; and with levels `places` [B × n], where each token
    of the caller's rows runs, and where shared runs of rows end.
    """
    rows, levels, tokens = bucket.batch, bucket.levels, bucket.batch * bucket.query_len
    sizes = {
        "slots": rows, "lens": rows, "ids": tokens, "changes": 2 * rows * num_mirrors,
        "places": tokens if levels else 0, "levels": StaticLevels.numbers(rows, levels),
    }  # fmt: skip
    ends = list(accumulate(sizes.values()))
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}


class HostInputs:
    """The rows of one bucket as the host writes them, into the first of `numbers`, int64, as `own` cuts these.

    What there are no rows for is padding: the slot `null`, `query_len` keys, tokens 0, and no change of the `mirrors`.
    """

    def __init__(self, bucket: GraphBucket, own: Sections, numbers: Ints, mirrors: Sequence[Mirror], null: int):
        def part(name: str) -> Ints:
            return numbers[own[name]]

        self.bucket, self.numbers = bucket, numbers[: own["levels"].stop]
        self.slots, self.lens, self.ids, self.places = part("slots"), part("lens"), part("ids"), part("places")
        self.levels = part("levels")
        changes = part("changes").reshape(len(mirrors), 2, bucket.batch)
        self.changes = list(zip(mirrors, changes, strict=True))
        self.numbers[:] = 0
        self.slots[:], self.lens[:], self.places[:] = null, bucket.query_len, range(len(self.places))
        for mirror, (places, _) in self.changes:
            places[:] = mirror.spare
        self._padding = self.numbers.copy()

    def write(self, slots: Rows, seq_lens: Rows, tokens: Rows = (), shared: Shared | None = None) -> None:
        """Writes these rows, in the order of `shared` where the bucket has levels, and what has changed in mirrors."""
        count = len(slots)
        self.numbers[:] = self._padding
        if self.bucket.levels:
            slots, seq_lens, tokens = self._ordered(slots, seq_lens, tokens, shared)
        self.slots[:count], self.lens[:count], self.ids[: len(tokens)] = slots, seq_lens, tokens
        for mirror, changes in self.changes:
            mirror.pending(changes)

    def _ordered(self, slots: Rows, seq_lens: Rows, tokens: Rows, shared: Shared | None) -> tuple[Rows, Rows, Rows]:
        """The rows in the order in which they run; writes where that puts their tokens, and what they share."""
        runs_as, levels = shared.rows(len(slots)) if shared else (range(len(slots)), ())
        order = np.array(runs_as, dtype=np.int64)
        places = self.places[: len(order) * self.bucket.query_len]
        places[:] = _reordered(places, order.argsort())
        self.levels[:] = StaticLevels.encode(levels, self.bucket.batch, self.bucket.levels)
        return _reordered(slots, order), _reordered(seq_lens, order), _reordered(tokens, order)


def _reordered(values: Rows, order: Ints) -> Ints:
    """The values of rows, as many of each, with the rows in this order."""
    rows = np.asarray(values, dtype=np.int64)
    return rows.reshape(len(order), -1)[order].flatten() if len(rows) else rows
