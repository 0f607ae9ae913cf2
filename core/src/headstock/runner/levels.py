"""The shared levels of decode batches: which prefixes each group's backend reads once for several rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headstock.backend import BackendSpec
from headstock.batch import SharedLevel
from headstock.device import Device
from headstock.kv.page_table import PageTable
from headstock.kv.sharing import Sharing
from headstock.runner.instances import Instance

LAUNCH_BYTES = {"cpu": 4 << 20}
"""What a device reads in the time that one more launch per layer takes, by device type; 16 MiB elsewhere."""


class Shared(NamedTuple):
    """The order in which rows run, and the levels of each group that has some."""

    order: list[int]
    levels: Mapping[str, tuple[SharedLevel, ...]]


class Levels:
    """Finds the shared levels of decode batches, and remembers those of the last one while its rows share the same.

    `instances` decode the groups whose backends read shared prefixes once, by group. Levels pay where the bytes that
    they save outweigh their launches and partial results; with `always`, wherever pages are shared.
    """

    def __init__(self, pages: PageTable, device: Device, instances: Mapping[str, Instance], always: bool = False):
        self.pages, self.device, self.instances, self.always = pages, device, instances, always
        self._key: tuple[int, ...] = ()
        self._last = Shared([], {})

    def find(self, slots: Sequence[int]) -> Shared:
        """The levels of a batch of these rows, and the rows in the order that the levels need."""
        key = (self.pages.version, *slots)
        if key != self._key:
            self._key, self._last = key, self._make(slots)
        return self._last

    def _make(self, slots: Sequence[int]) -> Shared:
        if not self.instances or len(slots) == 1:
            return Shared(list(range(len(slots))), {})
        sharing, levels = Sharing([self.pages.shared(slot) for slot in slots]), {}
        for group, instance in self.instances.items():
            cost = 0.0 if self.always else self._cost(instance, len(slots))
            if found := sharing.levels(instance.spec.max_levels, cost):
                levels[group] = tuple(SharedLevel.of(level, self.device.torch) for level in found)
        return Shared(sharing.order if levels else list(range(len(slots))), levels)

    def _cost(self, instance: Instance, rows: int) -> float:
        """What a level of one layer costs, in pages read: its launch, and its results written and read again."""
        launch = LAUNCH_BYTES.get(self.device.torch.type, 1 << 24)
        return (launch + 2 * rows * _state_bytes(instance.spec)) / instance.bytes_per_page


def _state_bytes(spec: BackendSpec) -> int:
    """Bytes of one token's output and log-sum-exp, in float32."""
    return spec.num_heads * (spec.v_head_dim + 1) * 4
