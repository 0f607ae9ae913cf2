"""The scene of a measurement: one workload's batch and tensors for one KV configuration, shared by its contestants."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headstock.backend import BackendSpec
from headstock.batch import ForwardBatch, SharedLevel
from headstock.bench.workload import Workload
from headstock.device import Device, torch_dtype, zeroed
from headstock.errors import HeadstockError
from headstock.kv.layout import KVLayout
from headstock.layer import AttentionLayer
from headstock.testing.problem import Problem, Result

COLD_BYTES = {"cpu": 1 << 26}
"""Bytes of keys and values that the layers of a scene hold together at least, by device type; 400 MB elsewhere.

Layers have caches of their own, so that none finds its keys where the one before it left them.
"""
MOST_LAYERS = 24
POOL = 8191  # tokens that keys are drawn from; a prime, so that no page holds what another does
CHECKED_KEYS = 20000


class TooLarge(HeadstockError):
    """A workload that does not fit into the device's memory, whoever serves it."""


class Scene:
    """A workload's page table, caches, q, k, v and output on a device.

    `spec` gives shapes, dtypes, page size, layout and window. Rows have `scattered` pages, as a cache in use deals them
    out, or consecutive ones; q, k and v are slices of one projection, or `packed` tensors of their own. A windowed
    group's table begins with the first page that a query can see, as the host has it; a `whole_table` is as wide as the
    longest context needs, as that of a graph is. Raises TooLarge where tensors or caches would not fit into
    the device's memory.
    """

    def __init__(
        self, spec: BackendSpec, layout: type[KVLayout], workload: Workload, *, scattered: bool = True,
        packed: bool = False, whole_table: bool = False, cold_bytes: int | None = None,
    ):  # fmt: skip
        self.spec, self.layout, self.workload = spec, layout, workload
        self.device = Device.open(spec.device)
        self._check_room()
        self._random = torch.Generator(self.device.torch).manual_seed(0)
        table, num_pages, lens = self._deal(scattered)
        if whole_table and (missing := -(-spec.max_context // spec.page_size) - table.shape[1]) > 0:
            table = torch.nn.functional.pad(table, (0, missing))
        ends = torch.tensor(workload.seq_lens)
        positions = [torch.arange(end - new, end) for new, end in zip(workload.query_lens, ends.tolist(), strict=True)]
        self.batch = ForwardBatch.from_lengths(
            workload.query_lens, lens, table.to(self.device.torch), spec.page_size, phase=workload.phase,
            positions=torch.cat(positions).to(self.device.torch),
        )  # fmt: skip
        self.levels = self._levels(table)
        self.q, self.k, self.v = self._tokens(packed)
        self.out = torch.empty(workload.tokens, spec.num_heads, spec.v_head_dim, dtype=self.q.dtype, device=spec.device)
        self.storages = self._caches(num_pages, COLD_BYTES.get(self.device.torch.type, 400_000_000)
                                     if cold_bytes is None else cold_bytes)  # fmt: skip
        heads = spec.num_heads
        sinks = torch.zeros(heads, device=spec.device) if spec.sinks else None
        slopes = torch.full((heads,), 0.01, device=spec.device) if spec.alibi else None
        self.layers = [
            AttentionLayer(i, layout.view(each, spec, 1.0, 1.0), sinks=sinks, alibi_slopes=slopes)
            for i, each in enumerate(self.storages)
        ]

    def check(self) -> None:
        """Compares the output of the first layer with the float64 reference, in tokens of a few rows.

        Raises AssertionError, naming the worst place. Rows are sampled until they have 20 000 keys.
        """
        rows, tokens, ends, lens = self._sampled()
        storage, table = self._part_of_cache(rows, lens)
        at = torch.tensor(tokens)
        batch = ForwardBatch.from_lengths(
            [1] * len(rows), lens, table, self.spec.page_size, phase="decode", write=False,
            positions=torch.tensor(ends) - 1,
        )  # fmt: skip
        layer = self.layers[0]
        problem = Problem(
            spec=replace(self.spec, device="cpu"), batch=batch, layout=self.layout, storage=storage,
            q=self.q[at.to(self.q.device)].cpu(), k=None, v=None,
            sinks=None if layer.sinks is None else layer.sinks.cpu(),
            alibi_slopes=None if layer.alibi_slopes is None else layer.alibi_slopes.cpu(),
        )  # fmt: skip
        problem.compare(Result(self.out[at.to(self.q.device)].cpu(), None, None))

    def _sampled(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Rows, and of each a token, its absolute end, and the keys that the row's table holds up to it."""
        load, rows, tokens, ends, lens, keys = self.workload, [], [], [], [], 0
        starts = [0, *torch.tensor(load.query_lens).cumsum(0).tolist()]
        local = self.batch.seq_lens.tolist()
        for row in dict.fromkeys((0, load.rows // 2, load.rows - 1)):
            for i in dict.fromkeys((load.query_lens[row] // 2, load.query_lens[row] - 1)):
                behind = load.query_lens[row] - 1 - i
                rows.append(row)
                tokens.append(starts[row] + i)
                ends.append(load.seq_lens[row] - behind)
                lens.append(local[row] - behind)
                keys += lens[-1]
                if keys > CHECKED_KEYS:
                    return rows, tokens, ends, lens
        return rows, tokens, ends, lens

    def _part_of_cache(self, rows: list[int], lens: list[int]) -> tuple[Tensor, Tensor]:
        """The pages of these rows alone, on the CPU, and the table that finds them there."""
        assert self.batch.page_table is not None, "scenes are of paged attention"
        width = -(-max(lens) // self.spec.page_size)
        table = self.batch.page_table[rows, :width].cpu()
        pages, places = torch.unique(table, return_inverse=True)
        return self.storages[0][pages.to(self.device.torch)].cpu(), places.int()

    def _deal(self, scattered: bool) -> tuple[Tensor, int, list[int]]:
        """The page table int32 [B, W], the number of pages, and the keys that each row's table holds."""
        load, size, window = self.workload, self.spec.page_size, self.spec.window
        hidden = [0] * load.rows  # keys that no query sees, in whole pages
        if window is not None:
            first = [end - new - window + 1 for new, end in zip(load.query_lens, load.seq_lens, strict=True)]
            hidden = [max(0, key) // size * size for key in first]
        lens = [end - gone for end, gone in zip(load.seq_lens, hidden, strict=True)]
        common = 0 if window is not None else load.shared // size
        counts = [-(-length // size) - common for length in lens]
        total = common + sum(counts)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0)) if scattered else torch.arange(total)
        order = order.int() + 1
        table = torch.zeros(load.rows, common + max(counts), dtype=torch.int32)
        table[:, :common] = order[:common]
        for row, own in enumerate(torch.split(order[common:], counts)):
            table[row, common : common + len(own)] = own
        return table, total + 1, lens

    def _levels(self, table: Tensor) -> tuple[SharedLevel, ...]:
        """The keys in common as a level for backends that read it once; a window has none."""
        common = 0 if self.spec.window is not None else self.workload.shared // self.spec.page_size
        if not common:
            return ()
        return (SharedLevel.of([(self.workload.rows, table[0, :common].tolist())], self.device.torch),)

    def _tokens(self, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        spec, count = self.spec, self.workload.tokens
        heads = [spec.num_heads, spec.num_kv_heads, 0 if spec.attention == "mla" else spec.num_kv_heads]
        dims = [spec.head_dim, spec.head_dim, spec.v_head_dim]
        widths = [n * dim for n, dim in zip(heads, dims, strict=True)]
        parts = torch.split(self._normal(count, sum(widths)), widths, dim=1)
        q, k, v = (x.view(count, n, dim) for x, n, dim in zip(parts, heads, dims, strict=True))
        if packed:
            q, k, v = (x.contiguous() for x in (q, k, v))
        return q, k, None if spec.attention == "mla" else v

    def _check_room(self) -> None:
        """Raises TooLarge where queries and new keys alone are too much, before anything is made."""
        spec = self.spec
        numbers = spec.num_heads * (spec.head_dim + spec.v_head_dim) + spec.num_kv_heads * 2 * spec.head_dim
        self._check_fits(self.workload.tokens * numbers * 4, "queries, new keys and outputs")  # drawn in float32

    def _check_fits(self, need: int, what: str) -> int:
        """Bytes that a scene may take, if they are as many as it needs."""
        free = self.device.free_memory() // 2
        if need > free:
            given = f"{self.workload.name}: {need / 1e9:.1f} GB of {what}"
            raise TooLarge("a workload does not fit", given=given, works=f"at most {free / 1e9:.1f} GB here")
        return free

    def _caches(self, num_pages: int, cold_bytes: int) -> list[Tensor]:
        spec, size = self.spec, self.layout.bytes_per_page(self.spec)
        need = num_pages * size
        free = self._check_fits(need, "keys and values")
        few = 1 if self.workload.phase == "extend" else max(2, -(-cold_bytes // need))
        first = zeroed(need, self.device.torch).view(num_pages, size)
        slots = torch.arange(spec.page_size, num_pages * spec.page_size, device=self.device.torch)
        k = self._normal(min(POOL, len(slots)), spec.num_kv_heads, spec.head_dim)
        v = None if spec.attention == "mla" else self._normal(len(k), spec.num_kv_heads, spec.v_head_dim)
        view = self.layout.view(first, spec, 1.0, 1.0)
        for part in torch.split(slots, len(k)):
            view.write(k[: len(part)], None if v is None else v[: len(part)], part)
        return [first, *(first.clone() for _ in range(min(few, MOST_LAYERS, max(1, free // need)) - 1))]

    def _normal(self, *shape: int) -> Tensor:
        wide = torch.randn(shape, generator=self._random, device=self.device.torch, dtype=torch.float32)
        return wide.to(torch_dtype(self.spec.dtype))
