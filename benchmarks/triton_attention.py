"""Attention layers of the triton plugin on one GPU, in CUDA graphs, beside torch's SDPA and FlashInfer where it is.

    python benchmarks/triton_attention.py --json benchmarks/results/triton_h200.json
    python benchmarks/triton_attention.py --tune plugins/triton/src/headstock_triton/configs.json

A figure is the median time of one layer: a graph holds several layers, each with a cache of its own, so that none finds
its keys in the L2 cache. `extend` runs eagerly, one layer per launch. --tune measures every configuration on every
decode and extend shape, and writes the best of each as the plugin's table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from report import environment
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import headstock_triton.plan
from headstock import AttentionLayer, BackendSpec, ForwardBatch, Workspace
from headstock.batch import SharedLevel
from headstock.kv.layout import NHD
from headstock_triton.backend import TritonAttention
from headstock_triton.config import Config, able, find

CACHES = 400e6
"""Bytes of keys and values that the layers of one graph read in all, at least: eight times the L2 cache of an H200."""


@dataclass(frozen=True)
class Shape:
    """One workload: `rows` requests of `new` new tokens over `cached` of their own and `shared` in common.

    `mixed`: of a sixteenth to all of `cached` instead, evenly spread.
    """

    rows: int
    new: int
    cached: int
    shared: int = 0
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 16
    mixed: bool = False

    @property
    def name(self) -> str:
        cached = f"{self.cached // 16}…{self.cached}" if self.mixed else str(self.cached)
        what = f"{self.rows}×{cached}" if self.new == 1 else f"{self.rows}×{self.new}+{cached}"
        return f"{self.shared} shared, {what}" if self.shared else what

    @property
    def length(self) -> int:
        """Keys of the longest row."""
        return self.shared + self.cached + (self.new if self.new > 1 else 0)

    @property
    def lengths(self) -> list[int]:
        """Keys of each row, in no order where they are mixed."""
        if not self.mixed:
            return [self.length] * self.rows
        spread = torch.linspace(self.cached // 16, self.cached, self.rows).long()
        return [self.shared + int(spread[7 * row % self.rows]) for row in range(self.rows)]

    @property
    def bytes(self) -> int:
        """Keys and values, each read once."""
        keys = self.shared + sum(length - self.shared for length in self.lengths)
        return keys * self.kv_heads * self.head_dim * 4

    @property
    def flops(self) -> float:
        """Of both products, over the pairs that a causal mask shows."""
        pairs = self.new * (self.length - self.new) + self.new * (self.new + 1) / 2
        return 4.0 * self.rows * pairs * self.heads * self.head_dim


DECODE = [Shape(64, 1, 4096), Shape(64, 1, 1024), Shape(8, 1, 4096), Shape(1, 1, 4096), Shape(1, 1, 32768),
          Shape(256, 1, 1024), Shape(24, 1, 8192), Shape(32, 1, 8192), Shape(32, 1, 8192, mixed=True),
          Shape(72, 1, 8192), Shape(64, 1, 4096, mixed=True)]  # fmt: skip
EXTEND = [Shape(4, 4096, 0), Shape(4, 512, 8192)]
CASCADE = [Shape(64, 1, 256, 8192), Shape(256, 1, 128, 4096)]


class Work:
    """A workload's tensors and its planned triton backend, for as many layers as caches are."""

    def __init__(self, shape: Shape):
        self.shape = shape
        gpu = torch.cuda.get_device_properties(0)
        tokens = shape.rows * shape.new
        self.spec = BackendSpec(
            device="cuda", compute_capability=gpu.major * 10 + gpu.minor, num_sms=gpu.multi_processor_count,
            dtype="bfloat16", kv_dtype="bfloat16", num_heads=shape.heads, num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim, v_head_dim=shape.head_dim, scale=shape.head_dim**-0.5, page_size=shape.page,
            kv_layout="nhd", max_batch=shape.rows, max_tokens=max(tokens, shape.rows), max_context=shape.length,
            max_levels=1 if shape.shared else 0, phases=frozenset({"decode" if shape.new == 1 else "extend"}),
        )  # fmt: skip
        own, common = -(-(shape.length - shape.shared) // shape.page), shape.shared // shape.page
        order = torch.randperm(shape.rows * own + common).int() + 1
        table = torch.cat((order[:common].expand(shape.rows, -1), order[common:].view(shape.rows, own)), 1).contiguous()
        self.table = table.cuda()
        self.batch = ForwardBatch.from_lengths(
            [shape.new] * shape.rows, shape.lengths, self.table, shape.page,
            shared_levels=self._levels(order[:common]) if shape.shared else (),
        )  # fmt: skip
        count = min(max(2, int(CACHES // shape.bytes) + 1), 24) if shape.new == 1 else 1
        size = NHD.bytes_per_page(self.spec)
        self.caches = [self._normal(len(order) + 1, size // 2).view(torch.uint8) for _ in range(count)]
        self.layers = [AttentionLayer(i, NHD.view(cache, self.spec, 1.0, 1.0)) for i, cache in enumerate(self.caches)]
        self.q = self._normal(tokens, shape.heads, shape.head_dim)
        self.k, self.v = (self._normal(tokens, shape.kv_heads, shape.head_dim) for _ in "kv")
        self.out = torch.empty_like(self.q)
        self.backend = self._backend()

    def plan(self) -> None:
        self.backend.init_forward_metadata(self.batch)
        self.backend.init_forward_metadata_in_graph(self.batch)

    def attend(self, layer: AttentionLayer) -> None:
        """One layer, its new keys cached already, as FlashInfer's `run` has them."""
        self.backend.forward(self.q, None, None, layer, self.batch, out=self.out)

    def write_and_attend(self, layer: AttentionLayer) -> None:
        self.backend.forward(self.q, self.k, self.v, layer, self.batch, out=self.out)

    def flat(self) -> None:
        """The same work without shared levels."""
        self.batch = replace(self.batch, shared_levels=(), metadata=None)

    def _levels(self, pages: Tensor) -> tuple[SharedLevel, ...]:
        rows, indptr = (torch.tensor([0, n], dtype=torch.int32) for n in (self.shape.rows, len(pages)))
        return (SharedLevel(rows.cuda(), indptr.cuda(), pages.cuda(), rows, indptr),)

    def _backend(self) -> TritonAttention:
        sizes = TritonAttention.workspace_bytes(self.spec)
        return TritonAttention(self.spec, Workspace(*(torch.zeros(n, dtype=torch.uint8, device="cuda") for n in sizes)))

    @staticmethod
    def _normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def seconds(run: Callable[[], None], repeat: int = 30) -> float:
    """The median time of `run` on the device."""
    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3


def graphed(run: Callable[[], None]) -> Callable[[], None]:
    """`run` as a captured graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def per_layer(work: Work, layer: Callable[[AttentionLayer], None], plan: Callable[[], None] | None = None) -> float:
    """Seconds of one layer among as many as there are caches, in a graph that plans first where `plan` is given."""

    def run() -> None:
        if plan is not None:
            plan()
        for each in work.layers:
            layer(each)

    return seconds(graphed(run)) / len(work.layers)


def triton_times(work: Work) -> dict[str, float]:
    work.plan()
    if work.shape.new > 1:
        return {"triton": seconds(lambda: work.attend(work.layers[0]))}
    again = lambda: work.backend.init_forward_metadata_in_graph(work.batch)  # noqa: E731
    times = {
        "triton": per_layer(work, work.attend),
        "triton with write": per_layer(work, work.write_and_attend),
        "triton with plan": per_layer(work, work.attend, again),
        "triton plan": seconds(graphed(again)),
    }
    if work.shape.shared:
        work.flat()
        work.plan()
        times["triton flat"] = per_layer(work, work.attend)
    return times


def sdpa_time(work: Work) -> dict[str, float]:
    """torch's attention over keys that lie one after the other, which no paged cache gives it."""
    shape = work.shape
    if shape.new not in (1, shape.length) or shape.shared or shape.mixed:
        return {}
    q = Work._normal(shape.rows, shape.heads, shape.new, shape.head_dim)
    kv = [[Work._normal(shape.rows, shape.kv_heads, shape.length, shape.head_dim) for _ in "kv"] for _ in work.caches]

    def run() -> None:
        for k, v in kv:
            scaled_dot_product_attention(q, k, v, is_causal=shape.new > 1, enable_gqa=True)

    return {"torch SDPA": seconds(graphed(run)) / len(kv)}


def flashinfer_times(work: Work) -> dict[str, float]:
    try:
        import flashinfer
    except ImportError:
        return {}
    shape, spec = work.shape, work.spec
    workspace = torch.zeros(512 * 2**20, dtype=torch.uint8, device="cuda")
    csr = work.batch.csr()
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    caches = [(layer.kv.k, layer.kv.v) for layer in work.layers]
    if shape.new > 1:
        times = {}
        for kind in ("fa2", "fa3"):
            prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kind)
            prefill.plan(
                work.batch.query_indptr_cpu, csr.page_indptr_cpu, csr.page_indices, csr.last_page_len_cpu, *heads,
                shape.page, causal=True, sm_scale=spec.scale, q_data_type=torch.bfloat16,
            )  # fmt: skip
            times[f"FlashInfer {kind}"] = seconds(lambda run=prefill.run: run(work.q, caches[0], out=work.out))
        return times
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=csr.page_indptr,
        paged_kv_indices_buffer=csr.page_indices, paged_kv_last_page_len_buffer=csr.last_page_len,
    )  # fmt: skip
    decode.plan(
        csr.page_indptr_cpu, csr.page_indices, csr.last_page_len_cpu, *heads, page_size=shape.page,
        sm_scale=spec.scale, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return {"FlashInfer": per_layer(work, lambda layer: decode.run(work.q, caches[layer.index], out=work.out))}


def measure(shape: Shape) -> dict[str, Any]:
    """The figures of one workload: microseconds, and TB/s or TFLOP/s."""
    work = Work(shape)
    times = triton_times(work) | sdpa_time(work) | flashinfer_times(work)
    figures: dict[str, Any] = {"shape": asdict(shape), "config": dict(work.backend.describe(work.batch))}
    for name, time in times.items():
        figures[name] = {"us": round(time * 1e6, 2)}
        if shape.new > 1:
            figures[name]["tflops"] = round(shape.flops / time / 1e12, 1)
        elif not shape.shared and "plan" not in name:
            figures[name]["tbps"] = round(shape.bytes / time / 1e12, 3)
    print(
        f"{shape.name:>24}",
        *(f"{name} {value['us']:.1f}" for name, value in figures.items() if "us" in value),
        sep="  ",
    )
    return figures


def candidates(block_m: int) -> Iterator[Config]:
    """Configurations worth measuring for a tile size."""
    if block_m >= 64:
        for n, warps, stages, registers in itertools.product((32, 64, 128), (4, 8), (2, 3, 4, 5), (0, 128)):
            yield Config(block_m, n, warps, stages, 2, 256, registers=registers)
        return
    for n, warps, stages, resident in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 5), (2, 3, 4)):
        for registers in (0, 128):
            yield Config(block_m, n, warps, stages, 2, 128, resident, registers=registers)


def time_with(work: Work, config: Config) -> float:
    """Seconds of one layer by a configuration; infinity where the GPU has no room for it."""
    headstock_triton.plan.find = lambda spec, pairs, most=128, filled=True: config
    try:
        work.backend = work._backend()
        work.plan()
        return triton_times(work)["triton"] if work.shape.new > 1 else per_layer(work, work.attend)
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return float("inf")
    finally:
        headstock_triton.plan.find = find


def rank(times: dict[Config, list[float]]) -> list[Config]:
    """Configurations by the sum of their times, each relative to the best of its shape."""
    best = [min(column) for column in zip(*times.values(), strict=True)]
    return sorted(times, key=lambda config: sum(t / b for t, b in zip(times[config], best, strict=True)))


def tune(path: Path) -> None:
    """Writes what is best over all shapes of a kind, and the kernel of Hopper with it where that is faster still."""
    entries = []
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    full = [shape for shape in DECODE if shape.rows * shape.kv_heads > sms]
    few = [shape for shape in DECODE if shape not in full]
    for block_m, filled, shapes in ((16, True, full), (16, False, few), (64, None, EXTEND), (128, True, EXTEND)):
        works = [Work(shape) for shape in shapes]
        times = {config: [time_with(work, config) for work in works] for config in candidates(block_m)}
        spec, hopper = works[0].spec, replace(rank(times)[0], kernel="attend_hopper")
        if block_m == 128 and able(spec, hopper):
            times[hopper] = [time_with(work, hopper) for work in works]
        ranked = rank(times)
        for config in ranked[:5]:
            print(config, *(f"{shape.name} {t * 1e6:.1f}" for shape, t in zip(shapes, times[config], strict=True)))
        entries.append(
            {"compute_capability": spec.compute_capability, "latent": False, "head_dim": spec.head_dim, "itemsize": 2,
             "page_sizes": [8, 16, 32, 64, 128, 256], "filled": filled, **asdict(ranked[0])}
        )  # fmt: skip
    table = json.loads(path.read_text(encoding="utf-8"))
    # latents have entries that stay, and so have wide tiles where they are few: prefixes that rows share
    staying = [each for each in table["entries"] if each["latent"] or (each["block_m"], each["filled"]) == (128, False)]
    table |= {
        "command": "python benchmarks/triton_attention.py --tune plugins/triton/src/headstock_triton/configs.json",
        "hardware": torch.cuda.get_device_name(),
        "entries": entries + staying,
    }
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the triton plugin's attention on this GPU.")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--tune", type=Path, help="measure configurations and write the table to this file")
    parser.add_argument("--only", choices=("decode", "extend", "cascade"), help="one kind of workload")
    args = parser.parse_args()
    if args.tune:
        tune(args.tune)
        return
    kinds = {"decode": DECODE, "extend": EXTEND, "cascade": CASCADE}
    figures = {
        kind: [measure(shape) for shape in shapes] for kind, shapes in kinds.items() if args.only in (None, kind)
    }
    if args.json:
        where = environment() | {"gpu": torch.cuda.get_device_name()}
        report = {"environment": where, "figures": figures}
        args.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
