"""The shared levels of decode batches: which prefixes each group's backend reads once for several rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from headstock.backend import BackendSpec
from headstock.batch import SharedLevel
from headstock.device import Device
from headstock.kv.page_table import PageTable
from headstock.kv.sharing import MAX_DEPTH, Level, Sharing
from headstock.runner.instances import Instance, Servers

LAUNCH_BYTES = {"cpu": 4 << 20}
"""What a device reads in the time that one more launch per layer takes, by device type; 16 MiB elsewhere."""


@dataclass(frozen=True, eq=False)
class Shared:
    """The order in which rows run, and the levels of each group that has some."""

    order: list[int]
    levels: Mapping[str, tuple[Level, ...]] = field(default_factory=dict)
    device: torch.device | None = None

    def rows(self, count: int) -> tuple[list[int], tuple[Level, ...]]:
        """The order of `count` rows, and the levels of the first group that has some."""
        return self.order or list(range(count)), next(iter(self.levels.values()), ())

    @cached_property
    def tensors(self) -> dict[str, tuple[SharedLevel, ...]]:
        """The levels as batches have them."""
        return {group: tuple(SharedLevel.of(each, self.device) for each in own) for group, own in self.levels.items()}


class Levels:
    """Finds the shared levels of decode batches, and remembers those of the last one while its rows share the same.

    `decoding` has who decodes each group, of whom some read shared prefixes once. Levels pay where the bytes that they
    save outweigh their launches and partial results; with `always`, wherever pages are shared.
    """

    def __init__(self, pages: PageTable, device: Device, decoding: Mapping[str, Servers], always: bool = False):
        self.pages, self.device, self.decoding, self.always = pages, device, decoding, always
        self._key: tuple[int, ...] = ()
        self._last = Shared([])

    def find(self, slots: Sequence[int], most: int = MAX_DEPTH, served: int | None = None) -> Shared:
        """The levels of a batch of these rows, no more than `most`, and the rows in the order that the levels need.

        Whoever serves batches of `served` rows, padding included, runs it; by default there is none.
        """
        key = (self.pages.version, most, served or len(slots), *slots)
        if key != self._key:
            self._key, self._last = key, self._make(slots, most, served or len(slots))
        return self._last

    def _make(self, slots: Sequence[int], most: int, served: int) -> Shared:
        each = ((group, servers.at(served)) for group, servers in self.decoding.items())
        reading = {group: instance for group, instance in each if instance.spec.max_levels}
        if not reading or len(slots) == 1 or not most:
            return Shared(list(range(len(slots))))
        sharing, levels = Sharing([self.pages.shared(slot) for slot in slots]), {}
        for group, instance in reading.items():
            cost = 0.0 if self.always else self._cost(instance, len(slots))
            if found := sharing.levels(min(most, instance.spec.max_levels), cost):
                levels[group] = found
        return Shared(sharing.order if levels else list(range(len(slots))), levels, self.device.torch)

    def _cost(self, instance: Instance, rows: int) -> float:
        """What a level of one layer costs, in pages read: its launch, and its results written and read again."""
        launch = LAUNCH_BYTES.get(self.device.torch.type, 1 << 24)
        return (launch + 2 * rows * _state_bytes(instance.spec)) / instance.bytes_per_page


def _state_bytes(spec: BackendSpec) -> int:
    """Bytes of one token's output and log-sum-exp, in float32."""
    return spec.num_heads * (spec.v_head_dim + 1) * 4
