"""Negotiation: milliseconds of wall time for 20 offers × 2 records × 2 phases × 2 layer groups, every mismatch told.

    python benchmarks/negotiate.py --json benchmarks/results/negotiate_cpu.json

The offers are drawn once from a fixed seed, so that some cover, some fail one axis, some several, and page sizes and
layouts are at odds. The budget of the median is 5 ms.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from report import environment

from headstock.capabilities import Capabilities
from headstock.ints import ANY, MultipleOf
from headstock.negotiate import Requirement, negotiate
from headstock.offer import Offer

RUNS = 100
BUDGET_MS = 5.0


def record(draw: random.Random, number: int, phase: str) -> Capabilities:
    return Capabilities(
        label=phase,
        devices={"cuda"},
        phases={phase},
        attention={"paged"},
        dtypes=draw.choice([{"bfloat16", "float16"}] * 4 + [{"float32"}]),
        head_dims=draw.choice([{64, 128}] * 4 + [{256}]),
        page_sizes=draw.choice([ANY, {16, 64}, MultipleOf(16), {1}, range(1, 257), {64}, {number + 1, 16}]),
        kv_layouts=draw.choice([{"nhd"}, {"hnd"}, {"nhd", "hnd"}]),
        sliding_window=draw.random() < 0.6,
        graph=draw.random() < 0.6,
        compute_capability=draw.choice([ANY, {90}, range(75, 130)]),
        gqa_ratios=draw.choice([ANY, {1, 2, 4, 8}, {1}]),
        preference=draw.randint(0, 50),
    )


def offers(count: int = 20) -> list[Offer]:
    draw = random.Random(7)
    return [
        Offer(
            name=f"backend-{number}",
            backend="package.module:Backend",
            capabilities=tuple(record(draw, number, phase) for phase in ("extend", "decode")),
        )
        for number in range(count)
    ]


def requirements() -> list[Requirement]:
    return [
        Requirement(
            group=group, role=phase, phase=phase, attention="paged", layers=16, device="cuda", compute_capability=90,
            dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, v_head_dim=128, num_heads=32, num_kv_heads=8,
            max_context=8192, sliding_window=window, wishes=("graph", "cascade"),
        )
        for group, window in (("full", None), ("window-4096", 4096))
        for phase in ("extend", "decode")
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Time one negotiation.")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    needs, field = requirements(), offers()
    decision = negotiate(needs, field)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        negotiate(needs, field)
        times.append((time.perf_counter() - start) * 1e3)
    median = statistics.median(times)
    mismatches = sum(len(miss.mismatches) for refusal in decision.refused for miss in refusal.nearest)
    print(f"median {median:.2f} ms of {RUNS} (fastest {min(times):.2f}); budget {BUDGET_MS:g} ms")
    print(f"{len(decision.refused)} refused with {mismatches} mismatches, {len(decision.outranked)} outranked")
    if args.json:
        figures = {
            "median_ms": round(median, 3),
            "fastest_ms": round(min(times), 3),
            "runs": RUNS,
            "budget_ms": BUDGET_MS,
            "solved": decision.solved,
            "refused": len(decision.refused),
            "mismatches": mismatches,
            "outranked": len(decision.outranked),
        }
        report = {"environment": environment(), "figures": figures}
        args.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
