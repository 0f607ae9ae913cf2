"""FlashInfer through its plugin and called directly, on the same batches of one GPU, by turns in one run.

    python benchmarks/flashinfer_attention.py --json benchmarks/results/flashinfer_h200.json
    python benchmarks/flashinfer_attention.py --kernels

Kernel time is the median time of one layer, several layers to a graph as in `triton_attention.py`; extend runs eagerly.
Host time is what one step of 32 layers takes to issue, its plan included, with the device left behind. --kernels times
every kernel that the plugin can choose between on every shape: what its table, `choice.json`, is made from.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import flashinfer
import numpy as np
import torch
from report import environment
from torch import Tensor
from triton_attention import CASCADE, EXTEND, Shape, Work, graphed, seconds

from headstock import AttentionLayer, Workspace
from headstock.backend import GraphBucket
from headstock_flashinfer.backend import FlashInferAttention
from headstock_flashinfer.options import Options

DECODE = [Shape(64, 1, 4096), Shape(256, 1, 1024), Shape(64, 1, 1024), Shape(8, 1, 4096), Shape(1, 1, 32768),
          Shape(1, 1, 4096)]  # fmt: skip
SHARED = [*CASCADE, Shape(64, 1, 256, 32768), Shape(16, 1, 128, 2048)]
STEPS = [Shape(1, 1, 1024), Shape(64, 1, 1024), Shape(256, 1, 1024)]
LAYERS = 32
ROUNDS = 3


class FlashInferWork(Work):
    """A workload with its planned plugin backend: as a captured size where it decodes, else eagerly."""

    def __init__(self, shape: Shape, options: Options | None = None, graph: bool = True):
        self.options, self.graph = options or Options(), graph and shape.new == 1
        super().__init__(shape)

    def _backend(self) -> FlashInferAttention:
        bucket = GraphBucket(self.shape.rows, 1, len(self.batch.shared_levels))
        self.spec = replace(self.spec, options=self.options, graph_buckets=(bucket,) if self.graph else ())
        sizes = FlashInferAttention.workspace_bytes(self.spec)
        memory = (torch.zeros(n, dtype=torch.uint8, device="cuda") for n in sizes)
        backend = FlashInferAttention(self.spec, Workspace(*memory))
        if self.graph:
            backend.init_cuda_graph_state([self.batch])
            self.batch.graph = "capture"
        return backend

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.shape.heads, self.shape.kv_heads, self.shape.head_dim

    def cache(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        return layer.kv.k, layer.kv.v

    def flat_one(self) -> FlashInferWork:
        """The same rows and pages without shared levels, in a captured size of its own."""
        self.batch = replace(self.batch, shared_levels=(), metadata=None, graph=None, _csr={})
        self.backend = self._backend()
        return self


NUMBERS: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def decode_direct(work: FlashInferWork, graph: bool = True) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    csr, workspace = work.batch.csr(), torch.zeros(512 * 2**20, dtype=torch.uint8, device="cuda")
    buffers = {
        "use_cuda_graph": True, "paged_kv_indptr_buffer": csr.page_indptr, "paged_kv_indices_buffer": csr.page_indices,
        "paged_kv_last_page_len_buffer": csr.last_page_len,
    }  # fmt: skip
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2", **(buffers if graph else {})
    )
    wrapper.plan(
        csr.page_indptr_cpu, csr.page_indices, csr.last_page_len_cpu, *work.heads, work.shape.page,
        sm_scale=work.spec.scale, **NUMBERS,
    )  # fmt: skip
    return wrapper


def paged_direct(work: FlashInferWork, kernel: str) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
    csr, workspace = work.batch.csr(), torch.zeros(512 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel)
    wrapper.plan(
        work.batch.query_indptr_cpu, csr.page_indptr_cpu, csr.page_indices, csr.last_page_len_cpu, *work.heads,
        work.shape.page, causal=True, sm_scale=work.spec.scale, **NUMBERS,
    )  # fmt: skip
    return wrapper


def cascade_direct(work: FlashInferWork) -> flashinfer.MultiLevelCascadeAttentionWrapper:
    """FlashInfer's own cascade, with the kernels that it chooses."""
    workspace = torch.zeros(512 * 2**20, dtype=torch.uint8, device="cuda")
    [level], own = work.batch.shared_levels, work.batch.csr("own")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    last = torch.tensor([work.shape.page], dtype=torch.int32)
    wrapper.plan(
        [level.row_indptr_cpu, work.batch.query_indptr_cpu], [level.page_indptr_cpu, own.page_indptr_cpu],
        [level.page_indices, own.page_indices], [last, own.last_page_len_cpu], *work.heads, work.shape.page,
        sm_scale=work.spec.scale, **NUMBERS,
    )  # fmt: skip
    return wrapper


def per_layer(work: FlashInferWork, layer: Callable[[AttentionLayer], Any]) -> Callable[[], float]:
    """Seconds of one layer among as many as there are caches, in one graph."""
    replay = graphed(lambda: [layer(each) for each in work.layers] and None)
    return lambda: seconds(replay) / len(work.layers)


def eagerly(work: FlashInferWork, layer: Callable[[AttentionLayer], Any]) -> Callable[[], float]:
    return lambda: seconds(lambda: layer(work.layers[0]))


def by_turns(timers: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The best of several rounds for each, taken in turns, so that a clock that drifts does not favour any."""
    rounds = [{name: timer() for name, timer in timers.items()} for _ in range(ROUNDS)]
    return {name: min(times[name] for times in rounds) for name in timers}


def kernel_times(shape: Shape) -> dict[str, Any]:
    """Through the plugin and directly: decode in graphs, extend eagerly, shared prefixes in graphs, too."""
    work = FlashInferWork(shape)
    work.plan()
    described = dict(work.backend.describe(work.batch))
    if shape.new > 1:
        timers = {"plugin": eagerly(work, work.attend)}
        for kernel in ("fa2", "fa3"):
            run = paged_direct(work, kernel).run
            timers[f"direct {kernel}"] = eagerly(
                work, lambda layer, run=run: run(work.q, work.cache(layer), out=work.out)
            )
    elif shape.shared:
        cascade = cascade_direct(work)
        timers = {
            "plugin": per_layer(work, work.attend),
            "FlashInfer's cascade": per_layer(work, lambda layer: cascade.run(work.q, work.cache(layer))),
        }
        flat = FlashInferWork(shape).flat_one()
        flat.plan()
        timers["plugin, flat"] = per_layer(flat, flat.attend)
    else:
        run = decode_direct(work).run
        timers = {
            "plugin": per_layer(work, work.attend),
            "direct fa2": per_layer(work, lambda layer: run(work.q, work.cache(layer), out=work.out)),
            "plugin with write": per_layer(work, work.write_and_attend),
        }
    times = by_turns(timers)
    figures: dict[str, Any] = {"shape": asdict(shape), "described": described}
    for name, taken in times.items():
        figures[name] = {"us": round(taken * 1e6, 2)}
        if shape.new > 1:
            figures[name]["tflops"] = round(shape.flops / taken / 1e12, 1)
        else:
            figures[name]["tbps"] = round(shape.bytes / taken / 1e12, 3)
    same = f"direct {described['kernel'].split()[-1]}" if shape.new > 1 else "direct fa2"
    if same in times:
        figures["ratio"] = round(times["plugin"] / times[same], 4)
    shown = (
        f"{name} {value['us']:.1f}" for name, value in figures.items() if isinstance(value, dict) and "us" in value
    )
    print(f"{shape.name:>24}", *shown, figures.get("ratio", ""), sep="  ", flush=True)
    return figures


class Handwritten:
    """A decode loop as one writes it by hand for FlashInfer: page table, plan, and for each layer append and run."""

    def __init__(self, work: FlashInferWork):
        self.work, self.wrapper = work, decode_direct(work, graph=False)
        self.table, self.page = work.table, work.shape.page
        self.lens = work.batch.seq_lens_cpu.numpy()

    def step(self) -> None:
        work, batch = self.work, self.work.batch
        pages = -(-self.lens // self.page)
        indptr = np.zeros(len(pages) + 1, dtype=np.int32)
        np.cumsum(pages, out=indptr[1:])
        last = (self.lens - (pages - 1) * self.page).astype(np.int32)
        rows = np.repeat(np.arange(len(pages)), pages)
        columns = np.arange(indptr[-1]) - indptr[:-1][rows]
        rows, columns = (torch.from_numpy(each).cuda(non_blocking=True) for each in (rows, columns))
        indices = self.table[rows, columns]
        indptr, last = torch.from_numpy(indptr), torch.from_numpy(last)
        self.wrapper.plan(indptr, indices, last, *work.heads, self.page, sm_scale=work.spec.scale, **NUMBERS)
        indptr, last = indptr.cuda(non_blocking=True), last.cuda(non_blocking=True)
        at = flashinfer.get_batch_indices_positions(batch.query_indptr, batch.seq_lens, batch.num_tokens)
        for number in range(LAYERS):
            cache = work.cache(work.layers[number % len(work.layers)])
            flashinfer.append_paged_kv_cache(work.k, work.v, *at, cache, indices, indptr, last)
            self.wrapper.run(work.q, cache, out=work.out)


def host_times(shape: Shape) -> dict[str, Any]:
    """Seconds that the host takes for one eager step of 32 layers, and to plan a replay."""
    work = FlashInferWork(shape, graph=False)
    by_hand = Handwritten(work)

    def through_plugin() -> None:
        work.batch._csr.clear()
        work.plan()
        for number in range(LAYERS):
            work.write_and_attend(work.layers[number % len(work.layers)])

    captured = FlashInferWork(shape)
    captured.plan()
    captured.batch.graph, lens = "replay", captured.batch.seq_lens_cpu
    other_pages = itertools.cycle((lens - captured.shape.page, lens))

    def replay() -> None:
        captured.backend.init_forward_metadata_replay_cuda_graph(captured.batch)

    def replay_of_other_pages() -> None:
        captured.batch.seq_lens_cpu = next(other_pages)
        replay()

    times = by_turns(
        {name: lambda run=run: issued(run) for name, run in
         {"plugin": through_plugin, "by hand": by_hand.step, "replay plan": replay_of_other_pages,
          "replay, same pages": replay}.items()}
    )  # fmt: skip
    figures = {name: round(taken * 1e6, 1) for name, taken in times.items()}
    figures["ratio"] = round(times["plugin"] / times["by hand"], 4)
    print(f"{'host, ' + shape.name:>24}", *(f"{name} {value}" for name, value in figures.items()), sep="  ", flush=True)
    return {"shape": asdict(shape), "us": figures}


def issued(run: Callable[[], None], repeat: int = 30) -> float:
    """The median time until `run` has returned, the device idle when it begins."""
    times = []
    for _ in range(repeat + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


def kernels() -> None:
    """Every kernel of every use on shapes where they compete."""
    groups = [{"heads": 32, "kv_heads": 32}, {"heads": 32, "kv_heads": 8}, {"heads": 64, "kv_heads": 8}]
    for shape in (replace(each, **group) for group in groups for each in DECODE[1:5]):
        compare(shape, "decode", ("tensor-cores", "cuda-cores"))
    prompts = [*EXTEND, Shape(16, 64, 1024), Shape(32, 16, 4096), Shape(4, 4096, 0, head_dim=64)]
    for shape in prompts:
        compare(shape, "prefill", ("fa2", "fa3"))
    for shape in (each for each in prompts if each.cached):
        compare(shape, "extend", ("paged", "split"))


def compare(shape: Shape, use: str, options: tuple[str, ...]) -> None:
    works = {option: FlashInferWork(shape, Options(**{use: option})) for option in options}
    for work in works.values():
        work.plan()
    attend = {option: work.write_and_attend if use == "extend" else work.attend for option, work in works.items()}
    timed = per_layer if shape.new == 1 else eagerly
    times = by_turns({option: timed(work, attend[option]) for option, work in works.items()})
    heads = f"{shape.heads}/{shape.kv_heads}×{shape.head_dim}"
    print(f"{use:>8} {heads:>10} {shape.name:>16}", *(f"{o} {t * 1e6:.1f} µs" for o, t in times.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time FlashInfer through its plugin and directly, on this GPU.")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", choices=("decode", "extend", "cascade", "host"), help="one kind of figures")
    parser.add_argument("--kernels", action="store_true", help="compare the kernels that the plugin chooses between")
    args = parser.parse_args()
    if args.kernels:
        kernels()
        return
    kinds = {"decode": (kernel_times, DECODE), "extend": (kernel_times, EXTEND), "cascade": (kernel_times, SHARED),
             "host": (host_times, STEPS)}  # fmt: skip
    figures = {
        kind: [measure(shape) for shape in shapes]
        for kind, (measure, shapes) in kinds.items()
        if args.only in (None, kind)
    }
    if args.json:
        text = json.dumps({"environment": environment(), "figures": figures}, indent=2, ensure_ascii=False)
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
