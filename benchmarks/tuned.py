"""What measuring is worth: a tuned choice beside every fixed one, on a mixed workload, by turns in one process.

    python benchmarks/tuned.py [--device cuda] [--plugin MODULE …] [--json FILE]

The field is every installed backend that can serve the model here, and one that goes row by row. It is tuned first, on
a grid that is not the workload; the tuned choice may switch by phase and by batch size. Then each round runs the whole
workload once per choice, step by step: planning, and as many layers as the model has. Ratios are of seconds, fixed over
tuned, round by round; their intervals are of 95 %, Student's, over the logarithms.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from report import environment, field
from row_by_row import OFFER

from headstock.bench.machine import Machine
from headstock.bench.shapes import preset
from headstock.bench.stand import Contestant, Scenes, Stand
from headstock.bench.tune import Tuner, default_grid
from headstock.bench.workload import Workload, parse
from headstock.decision import Decision
from headstock.device import Device
from headstock.negotiate import Candidate, Policy, negotiate
from headstock.runner.requirements import requirements

T95 = {6: 2.447, 8: 2.306, 10: 2.228, 14: 2.145, 20: 2.086, 30: 2.042}
"""Student's t for 95 %, two-sided, by degrees of freedom."""


def mixed(gpu: bool) -> list[Workload]:
    """Steps of a serving engine: decoding of few and many rows, equal and unequal ones, among prompts and chunks."""
    if gpu:
        loads = parse("decode:{1,3,12,48,180}x{700,3000} extend:1x800 extend:2x300+1500")
    else:
        loads = parse("decode:{1,2,6,24}x{90,700} extend:1x200 extend:1x60+500")
    draw = random.Random(1)
    for rows in (3, 10, 28):
        lens = tuple(draw.randint(20, 6000 if gpu else 900) for _ in range(rows))
        loads.append(Workload("decode", (1,) * rows, lens, name=f"decode:{rows} unequal rows"))
    return [*loads, *(load for load in loads if load.phase == "decode")]  # prompts are rarer


class Choice:
    """A way to serve the workload: a stand for each of its steps."""

    def __init__(self, name: str, decision: Decision, field: Mapping[str, Candidate], scenes: Mapping[str, Scenes],
                 loads: Sequence[Workload], shape: Any, device: Device):  # fmt: skip
        self.name, self.device, self.stands = name, device, []
        for load in loads:
            choice = next(each for each in decision.choices if each.requirement.phase == load.phase)
            winner = choice.winner(load.rows)
            graph = device.torch.type != "cpu" and "graph" in winner.granted
            who = Contestant(field[winner.backend], choice.requirement, shape, graph=graph)
            self.stands.append(scenes[load.name].stand(who, load, graph=graph and load.phase == "decode"))

    def seconds(self, step: int, layers: int) -> float:
        """Of one step of the workload, the middle one of three times."""
        stand = self.stands[step]
        return statistics.median(self._once(stand, layers) for _ in range(3))

    def _once(self, stand: Stand, layers: int) -> float:
        started = time.perf_counter()
        stand.plan()
        planning = time.perf_counter() - started
        return planning + self.device.seconds(stand.run) / len(stand.scene.layers) * layers


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of paired ratios, and its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, free = statistics.fmean(logs), len(logs) - 1
    t = next((T95[n] for n in sorted(T95, reverse=True) if n <= free), 3.0)
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


def rounds_of(choices: Sequence[Choice], layers: int, rounds: int) -> Iterator[dict[str, float]]:
    """Seconds by choice, round by round; at each step all choices take their turns, every other round backwards.

    A first round warms up.
    """
    for number in range(rounds + 1):
        order = choices[:: -1 if number % 2 else 1]
        seconds = {choice.name: 0.0 for choice in choices}
        for step in range(len(choices[0].stands)):
            for choice in order:
                seconds[choice.name] += choice.seconds(step, layers)
        if number:
            yield seconds


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the tuned choice of backends with every fixed one.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", help="a preset, by default smollm2-135m on a CPU and llama-8b elsewhere")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tuning")
    parser.add_argument("--plugin", action="append", help="a module to take backends from, in place of all installed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.rounds < 7:
        parser.error("at least 7 rounds")
    device = Device.open(args.device)
    gpu = device.torch.type != "cpu"
    config = preset(args.shape or ("llama-8b" if gpu else "smollm2-135m"))
    most, context = (256, 8192) if gpu else (32, 1024)
    needs = requirements(
        config, device=device.torch.type, compute_capability=device.compute_capability,
        dtype=device.default_dtype(config.dtype), max_context=context, graph="auto" if gpu else "off",
    )  # fmt: skip
    candidates = [*field(args.plugin), Candidate.of(OFFER)]

    tuner = Tuner(config, needs, candidates, Policy(), device)
    tuned = tuner.run(default_grid(most, context, not gpu), args.budget, lambda what, *_: print(what, flush=True))
    measurements = tuner.profile(tuned, Machine.here(device.torch.type)).measurements()
    free = Policy(profile=measurements, by_batch=True)
    decisions = {"tuned": negotiate(needs, candidates, free)}
    for each in candidates:
        fixed = negotiate(needs, candidates, free.model_copy(update={"backends": {"all": each.name}}))
        if fixed.solved:
            decisions[each.name] = fixed
    for choice in decisions["tuned"].choices:
        for winner in choice.winners:
            upto = f" up to {winner.max_batch} rows" if winner.max_batch else ""
            print(f"{choice.requirement.where}{upto}: {winner.backend}: {winner.why}")

    loads, by_name = mixed(gpu), {each.name: each for each in candidates}
    scenes = {load.name: Scenes(device, candidates, 1 << 22 if not gpu else 100_000_000) for load in loads}
    make: Callable[[str], Choice] = lambda name: Choice(  # noqa: E731
        name, decisions[name], by_name, scenes, loads, config.layers[0], device
    )
    choices = [make(name) for name in decisions]
    figures = list(rounds_of(choices, config.num_layers, args.rounds))
    medians = {name: statistics.median(each[name] for each in figures) for name in decisions}
    ratios = {name: interval([each[name] / each["tuned"] for each in figures]) for name in decisions if name != "tuned"}
    best, worst = (pick(ratios, key=lambda name: medians[name]) for pick in (min, max))
    for name, seconds in medians.items():
        print(
            f"{name:<14}{seconds * 1e3:9.1f} ms"
            + ("" if name == "tuned" else "   fixed / tuned {1:.3f} ({0:.3f} … {2:.3f})".format(*ratios[name]))
        )
    print(f"over the best fixed choice ({best}) at least {ratios[best][0]:.3f}, wanted 0.97")
    print(f"over the worst fixed choice ({worst}) at least {ratios[worst][0]:.3f}, wanted more than 1")
    if args.json:
        report = {
            "environment": environment() | {"device": Machine.here(device.torch.type).device},
            "shape": args.shape or ("llama-8b" if gpu else "smollm2-135m"),
            "dtype": needs[0].dtype,
            "tuned": {c.role: [[w.max_batch, w.backend, w.why] for w in c.winners] for c in decisions["tuned"].choices},
            "workload": [load.name for load in loads],
            "points": [point.model_dump() for point in tuned.points],
            "left_out": {"workloads": tuned.left, "failures": list(tuned.failures.values())},
            "seconds": {name: [round(each[name], 6) for each in figures] for name in decisions},
            "fixed_over_tuned": {name: [round(value, 4) for value in each] for name, each in ratios.items()},
            "over_best": round(ratios[best][0], 4),
            "over_worst": round(ratios[worst][0], 4),
        }
        args.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
