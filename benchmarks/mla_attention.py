"""Absorbed MLA decode on one GPU, in CUDA graphs, through the backends that offer it.

    python benchmarks/mla_attention.py --json benchmarks/results/mla_h200.json
    python benchmarks/mla_attention.py --tune plugins/triton/src/headstock_triton/configs.json

A figure is the median time of one layer: a graph holds several layers, each with a cache of its own full of random
latents, so that none finds its keys in the L2 cache. A backend without graphs runs eagerly. --tune measures
configurations of the triton plugin and writes the best of each kind into its table.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from report import environment
from triton_attention import graphed, seconds

from headstock import AttentionBackend, AttentionLayer, BackendSpec, ForwardBatch, Workspace
from headstock.backend import GraphBucket
from headstock.kv.layout import Latent
from headstock.load import load_backend
from headstock.offer import Candidate

PLUGINS = ("headstock_flashinfer_mla", "headstock_triton", "headstock_torch_native")
CACHES = 400e6
"""Bytes of latents that the layers of one graph read in all, at least: eight times the L2 cache of an H200."""


@dataclass(frozen=True)
class Shape:
    """One workload: `rows` requests of `new` tokens each over `length` keys, those of this step included."""

    rows: int
    length: int
    heads: int
    new: int = 1
    rank: int = 512
    rope: int = 64
    page: int = 64

    @property
    def name(self) -> str:
        verified = f", {self.new} tokens each" if self.new > 1 else ""
        return f"{self.rows}×{self.length}, {self.heads} heads{verified}"

    @property
    def bytes(self) -> int:
        """Latents, each read once."""
        return self.rows * self.length * (self.rank + self.rope) * 2

    @property
    def flops(self) -> int:
        """Of both products."""
        return 2 * self.rows * self.new * self.length * self.heads * (2 * self.rank + self.rope)


SHAPES = [Shape(64, 4096, 128), Shape(16, 4096, 128), Shape(1, 4096, 128), Shape(64, 4096, 16)]
MORE = [Shape(128, 4096, 128), Shape(64, 4096, 128, new=2), Shape(1, 32768, 128), Shape(64, 4096, 32)]


class Work:
    """A workload's tensors, and a backend that has planned its static batch for a capture."""

    def __init__(self, shape: Shape, backend: type[AttentionBackend], graph: bool = True):
        self.shape, self.graph = shape, graph
        gpu = torch.cuda.get_device_properties(0)
        bucket = GraphBucket(shape.rows, shape.new)
        self.spec = BackendSpec(
            device="cuda", compute_capability=gpu.major * 10 + gpu.minor, num_sms=gpu.multi_processor_count,
            attention="mla", phases=frozenset({"decode"}), dtype="bfloat16", kv_dtype="bfloat16",
            num_heads=shape.heads, num_kv_heads=1, head_dim=shape.rank + shape.rope, v_head_dim=shape.rank,
            scale=(shape.rank // 4 + shape.rope) ** -0.5, page_size=shape.page, kv_layout="latent",
            max_batch=shape.rows, max_tokens=shape.rows * shape.new, max_context=shape.length,
            query_lens=frozenset({shape.new}), graph_buckets=(bucket,) if graph else (),
        )  # fmt: skip
        pages = -(-shape.length // shape.page)
        order = torch.randperm(shape.rows * pages).int() + 1
        self.batch = ForwardBatch.from_lengths(
            [shape.new] * shape.rows, [shape.length] * shape.rows, order.view(shape.rows, pages).cuda(), shape.page,
            phase="decode",
        )  # fmt: skip
        self.batch.graph = "capture" if graph else None
        size = Latent.bytes_per_page(self.spec)
        count = min(max(2, int(CACHES // shape.bytes) + 1), 24)
        self.caches = [self._normal(len(order) + 1, size // 2).view(torch.uint8) for _ in range(count)]
        views = [Latent.view(cache, self.spec, 1.0, 1.0) for cache in self.caches]
        self.layers = [AttentionLayer(i, view) for i, view in enumerate(views)]
        self.q = self._normal(shape.rows * shape.new, shape.heads, self.spec.head_dim)
        self.k = self._normal(shape.rows * shape.new, 1, self.spec.head_dim)
        self.out = torch.empty_like(self.q[..., : shape.rank])
        self.use(backend)

    def use(self, backend: type[AttentionBackend]) -> None:
        """Makes an instance and lets it plan."""
        sizes = backend.workspace_bytes(self.spec)
        memory = (torch.zeros(count, dtype=torch.uint8, device="cuda") for count in sizes)
        self.backend = backend(self.spec, Workspace(*memory))
        if self.graph:
            self.backend.init_cuda_graph_state([self.batch])
            self.backend.init_forward_metadata_capture_cuda_graph(self.batch)
        else:
            self.backend.init_forward_metadata(self.batch)
        self.plan()

    def plan(self) -> None:
        """What of planning the graph of a step records."""
        self.backend.init_forward_metadata_in_graph(self.batch)

    def attend(self, layer: AttentionLayer) -> None:
        """One layer, its new tokens cached already."""
        self.backend.forward(self.q, None, None, layer, self.batch, out=self.out)

    def write_and_attend(self, layer: AttentionLayer) -> None:
        self.backend.forward(self.q, self.k, None, layer, self.batch, out=self.out)

    def per_layer(self, layer: Callable[[AttentionLayer], None], planned: bool = False) -> float:
        """Seconds of one layer among as many as there are caches; `planned` once more for all of them."""

        def run() -> None:
            if planned:
                self.plan()
            for each in self.layers:
                layer(each)

        return seconds(graphed(run) if self.graph else run) / len(self.layers)

    def error(self) -> float:
        """The largest difference from attention in float32 by torch, in the last layer."""
        layer, shape, out = self.layers[-1], self.shape, torch.empty_like(self.out)
        self.backend.forward(self.q, None, None, layer, self.batch, out=out)
        worst = 0.0
        for row, pages in enumerate(self.batch.page_table.tolist()):
            keys = layer.kv.latent[pages].flatten(0, 1)[: shape.length].float()
            part = slice(row * shape.new, (row + 1) * shape.new)
            scores = self.q[part].float() @ keys.T * self.spec.scale
            seen = torch.ones(shape.new, shape.length, dtype=torch.bool, device="cuda").tril(shape.length - shape.new)
            weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
            want = weights @ keys[:, : shape.rank]
            worst = max(worst, float((out[part].float() - want).abs().max()))
        return worst

    @staticmethod
    def _normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def measure(shape: Shape, name: str, backend: type[AttentionBackend], graph: bool) -> dict[str, Any]:
    """One workload's figures by one backend: microseconds, TFLOP/s and TB/s of a layer."""
    work = Work(shape, backend, graph)
    time = work.per_layer(work.attend)
    figures: dict[str, Any] = {
        "us": round(time * 1e6, 2),
        "tflops": round(shape.flops / time / 1e12, 1),
        "tbps": round(shape.bytes / time / 1e12, 3),
        "us with write": round(work.per_layer(work.write_and_attend) * 1e6, 2),
        "us with plan": round(work.per_layer(work.attend, planned=True) * 1e6, 2),
        "error": round(work.error(), 5),
        "graph": graph,
        "kernel": dict(work.backend.describe(work.batch)),
    }
    print(
        f"{shape.name:>32}  {name:<22} {figures['us']:8.1f} µs  {figures['tflops']:6.1f} TFLOP/s  "
        f"{figures['tbps']:.2f} TB/s  error {figures['error']:.4f}"
    )
    return figures


def backends(names: list[str]) -> dict[str, tuple[type[AttentionBackend], bool]]:
    """What the plugins here that can be imported offer for MLA on a GPU, all or those that are named: class, graphs.

    Where FlashInfer is, both its kernels called directly come first.
    """
    found: dict[str, tuple[type[AttentionBackend], bool]] = {}
    if find_spec("flashinfer"):
        peer = import_module("mla_peer")
        peers = {"flashinfer-direct-fa3": peer.Fa3, "flashinfer-direct-fa2": peer.Fa2}
        found = {name: (direct, True) for name, direct in peers.items() if not names or name in names}
    for plugin in PLUGINS:
        try:
            offers = import_module(plugin).attention_backends()
        except ImportError:
            continue
        for offer in offers:
            able = [each for each in offer.capabilities if "mla" in each.attention and "cuda" in each.devices]
            if able and (not names or offer.name in names):
                found[offer.name] = load_backend(Candidate.of(offer)), any(each.graph for each in able)
    return found


def candidates(block_m: int, split: bool) -> Iterator[Any]:
    """Configurations of the triton plugin worth measuring for a tile size; what governs splits only where some are."""
    from headstock_triton.config import Config

    if block_m >= 64:
        tiles = [(32, 8, 5), (32, 8, 7), (64, 8, 2), (64, 8, 3), (64, 8, 5)]
        splits = itertools.product((1,), (64, 128, 256), (1, 2, 4, 8)) if split else [(1, 128, 2)]
    else:
        tiles = list(itertools.product((32, 64), (2, 4, 8), (3, 5, 7)))
        splits = itertools.product((1, 2, 3, 4), (256,), (1, 4))
    for (n, warps, stages), (programs, keys, merged) in itertools.product(tiles, list(splits)):
        yield Config(block_m, n, warps, stages, programs, keys, merged)
        if (block_m, n, warps, stages) == (64, 64, 8, 2):  # where that kernel cannot be used, the same once more
            yield Config(block_m, n, warps, stages, programs, keys, merged, kernel="latent_hopper")


def tune(path: Path) -> None:
    """Writes what is best over the shapes of a kind: of the least sum of times relative to each shape's best."""
    import headstock_triton.plan
    from headstock_triton.backend import TritonAttention
    from headstock_triton.config import find, padded

    def time_with(work: Work, config: Any) -> float:
        headstock_triton.plan.find = lambda spec, pairs, most=128, filled=True: config
        try:
            work.use(TritonAttention)
            return work.per_layer(work.attend)
        except Exception as error:
            if "out of resource" not in str(error):
                raise
            return float("inf")
        finally:
            headstock_triton.plan.find = find

    entries = []
    for block_m, filled, shapes in ((64, True, SHAPES[:1]), (64, False, SHAPES[1:3]), (16, None, SHAPES[3:])):
        works = [Work(shape, TritonAttention) for shape in shapes]
        times = {config: [time_with(work, config) for work in works] for config in candidates(block_m, not filled)}
        best = [min(column) for column in zip(*times.values(), strict=True)]
        ranked = sorted(times, key=lambda config: sum(t / b for t, b in zip(times[config], best, strict=True)))
        for config in ranked[:8]:
            print(config, *(f"{shape.name} {t * 1e6:.1f}" for shape, t in zip(shapes, times[config], strict=True)))
        spec = works[0].spec
        entries.append(
            {"compute_capability": spec.compute_capability, "latent": True, "head_dim": padded(spec), "itemsize": 2,
             "page_sizes": [64, 128, 256], "filled": filled, **asdict(ranked[0])}
        )  # fmt: skip
        del works
    table = json.loads(path.read_text(encoding="utf-8"))
    table["latents by"] = "python benchmarks/mla_attention.py --tune plugins/triton/src/headstock_triton/configs.json"
    # tiles of 32 heads are for one row and pages that the kernel of Hopper does not read, and stay
    staying = [each for each in table["entries"] if not each["latent"] or each["block_m"] == 32]
    table["entries"] = staying + entries
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time absorbed MLA decode on this GPU.")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--tune", type=Path, help="measure triton's configurations and write them to this table")
    parser.add_argument("--backend", action="append", default=[], help="one by name; all by default")
    parser.add_argument("--more", action="store_true", help="more workloads than the four")
    args = parser.parse_args()
    if args.tune:
        tune(args.tune)
        return
    found = backends(args.backend)
    figures = [
        {"shape": asdict(shape), "name": shape.name}
        | {name: measure(shape, name, *backend) for name, backend in found.items()}
        for shape in (SHAPES + MORE if args.more else SHAPES)
    ]
    if args.json:
        where = environment() | {"gpu": torch.cuda.get_device_name()}
        report = {"environment": where, "figures": figures}
        args.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
