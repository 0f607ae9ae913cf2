"""A model of Llama-3.1-8B's shape with random weights on one GPU: a decode step by backend, batch size and context.

    python benchmarks/backends_gpu.py [--backend NAME …] [--plugin MODULE …] [--batch N …] [--context N …] [--json FILE]

Every installed backend that serves the model is measured in a process of its own, as the host runs it: `ModelRunner`
with device graphs where the backend can be captured. A step is the median over steps issued one after another; its
limit is the time in which the device would read the weights once, but for the embedding, and every row's keys and
values, at the rate at which it reads memory, which is measured first. The host's time is that of issuing a step on an
idle device, less that of launching the graph alone. `eager` is the same step without its graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import environment, field

from headstock import ModelRunner, negotiate
from headstock.device import Device
from headstock.models.config import ModelConfig
from headstock.offer import Candidate
from headstock.policy import Policy
from headstock.runner.requirements import requirements

SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
STEPS, WARM_UP = 30, 4


def backends(config: ModelConfig, device: Device, candidates: list[Candidate]) -> list[str]:
    """The installed backends that serve both phases of the model here."""
    needs = requirements(
        config, device=device.torch.type, compute_capability=device.compute_capability, dtype="bfloat16"
    )
    asked = {each.name: Policy(backends={"all": each.name}) for each in candidates}
    return [name for name, policy in asked.items() if negotiate(needs, candidates, policy).solved]


def read_rate(device: Device) -> float:
    """Bytes per second at which the device reads memory: a sum over more than its caches hold."""
    x = torch.ones(1 << 31, dtype=torch.bfloat16, device=device.torch).view(torch.int32)
    times = []
    for _ in range(7):
        device.synchronize()
        started = time.perf_counter()
        for _ in range(4):
            x.amax()
        device.synchronize()
        times.append((time.perf_counter() - started) / 4)
    return x.nbytes / min(times)


class Rows:
    """Rows of a runner that have `context` tokens cached: pages of their own, whose keys and values are random."""

    def __init__(self, runner: ModelRunner, count: int, context: int):
        self.runner, self.count = runner, count
        self.slots = [runner.pages.open() for _ in range(count)]
        for slot in self.slots:
            runner.pages.reserve({slot: context})
            runner.pages.advance(slot, context)
        self.tokens = [[17 * place % 1000] for place in range(count)]

    def step(self) -> None:
        self.runner.step(self.slots, self.tokens)

    def close(self) -> None:
        for slot in self.slots:
            self.runner.pages.close(slot)


def step_seconds(run: Callable[[], object], device: Device, steps: int = STEPS) -> float:
    """Seconds per step of steps issued one after another, the median of three rounds."""
    rounds = []
    for _ in range(3):
        device.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            run()
        device.synchronize()
        rounds.append((time.perf_counter() - started) / steps)
    return statistics.median(rounds)


def issue_seconds(run: Callable[[], object], device: Device) -> float:
    """Seconds until a step is issued on an idle device: the median of a round, the best of three rounds.

    Other work on the host's cores is nothing that a step takes.
    """
    rounds = []
    for _ in range(3):
        times = []
        for _ in range(STEPS):
            device.synchronize()
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        rounds.append(statistics.median(times))
    device.synchronize()
    return min(rounds)


def fill_caches(runner: ModelRunner) -> None:
    """Random keys and values in every page: zeros would be read faster than numbers are."""
    for layer in runner.steps.layers.values():
        for own in (layer.kv.k, layer.kv.v):  # type: ignore[union-attr]
            own.normal_()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One backend's figures at one context."""
    device = Device.open("cuda")
    rate = read_rate(device)
    config = ModelConfig.from_hf(SHAPE | {"num_hidden_layers": options.layers})
    [context], spare = options.context, 12 * STEPS
    kv_bytes = 2 * 2 * config.num_kv_heads * config.head_dim * config.num_layers
    room = int(0.8 * device.free_memory() - 17e9) // kv_bytes
    batches = [batch for batch in options.batch if batch * (context + spare) <= room]
    rows = max(batches)
    started = time.perf_counter()
    runner = ModelRunner(
        config, device="cuda", dtype="bfloat16", max_batch=rows, max_context=context + spare,
        kv_tokens=rows * (context + spare + 16), graph_sizes=batches,
        policy=Policy(backends={"all": options.child}, cascade="off"), offers=field(options.plugin),
    )  # fmt: skip
    figures: dict[str, Any] = {
        "start_seconds": time.perf_counter() - started,
        "memory": [" ".join(line.split()) for line in runner.memory.lines()],
        "notices": runner.notices,
        "captured": [] if runner.graphs is None else [
            {"rows": each.bucket.batch, "seconds": each.seconds, "bytes": each.num_bytes, "failure": each.failure}
            for each in runner.graphs.reports
        ],
        "read_bytes_per_second": rate,
        "left_out": [batch for batch in options.batch if batch not in batches],
        "batches": {},
    }  # fmt: skip
    fill_caches(runner)
    weights = runner.memory.weights - 2 * config.vocab_size * config.hidden_size
    for batch in batches:
        figures["batches"][str(batch)] = one(runner, device, batch, context, (weights, kv_bytes, rate))
    return figures


def one(
    runner: ModelRunner, device: Device, batch: int, context: int, sizes: tuple[int, int, float]
) -> dict[str, float]:
    weights, kv_bytes, rate = sizes
    rows, graphs = Rows(runner, batch, context), runner.graphs
    for _ in range(WARM_UP):
        rows.step()
    limit = (weights + batch * context * kv_bytes) / rate
    seconds = step_seconds(rows.step, device)
    figures = {"step_ms": seconds * 1e3, "limit_ms": limit * 1e3, "fraction": limit / seconds}
    if graphs is not None:
        bucket = graphs.bucket_for(batch)
        assert bucket is not None, "every batch that is measured is captured"
        launch = issue_seconds(graphs._captured[bucket].graph.replay, device)
        figures["host_us"] = (issue_seconds(rows.step, device) - launch) * 1e6
        runner.graphs = None
        figures["eager_ms"] = step_seconds(rows.step, device, 5) * 1e3
        runner.graphs = graphs
    rows.close()
    return figures


def summarise(name: str, context: int, figures: dict[str, Any]) -> None:
    rate = figures["read_bytes_per_second"] / 1e12
    took = sum(each["seconds"] for each in figures["captured"])
    size = sum(each["bytes"] for each in figures["captured"]) >> 20
    print(f"{name}, context {context}: memory reads {rate:.2f} TB/s, captures took {took:.1f} s and {size} MiB")
    for batch, own in figures["batches"].items():
        graph = f"host {own['host_us']:4.0f} µs, eager {own['eager_ms']:6.2f} ms" if "host_us" in own else "no graph"
        print(f"  batch {batch:>4} {own['step_ms']:7.3f} ms, {own['fraction']:.3f} of the limit, {graph}")
    for notice in figures["notices"]:
        print(f"  {notice}")


def in_a_process(name: str, context: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        batch = [str(each) for each in options.batch]
        given = ["--batch", *batch, "--context", str(context), "--layers", str(options.layers)]
        given += [word for module in options.plugin or () for word in ("--plugin", module)]
        subprocess.run([sys.executable, __file__, *given, "--child", name, "--json", str(file)], check=True)
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", help="by default all that serve the model")
    parser.add_argument("--plugin", action="append", help="a module to take backends from, in place of all")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        options.json.write_text(json.dumps(measure(options)), encoding="utf-8")
        return
    names = options.backend or backends(ModelConfig.from_hf(SHAPE), Device.open("cuda"), field(options.plugin))
    document: dict[str, Any] = {"environment": environment(), "model": SHAPE, "backends": {}}
    for name in names:
        for context in options.context:
            figures = in_a_process(name, context, options)
            document["backends"].setdefault(name, {})[str(context)] = figures
            summarise(name, context, figures)
            if options.json:  # after each, so that a run that is cut keeps what it has
                options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
