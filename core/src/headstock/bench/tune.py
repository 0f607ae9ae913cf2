"""Tuning: what negotiation finds valid for a model and device, measured over a grid of workloads within a budget."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, product, zip_longest
from typing import Any

import torch

from headstock.bench.compare import Options, Report, checked, per_layer
from headstock.bench.machine import Machine, packages
from headstock.bench.profile import Point, Profile, as_text, shape_of
from headstock.bench.scene import TooLarge
from headstock.bench.stand import Contestant, Scenes, Stand
from headstock.bench.timing import by_turns, on_host
from headstock.bench.workload import FORMS, Workload, parse
from headstock.device import Device
from headstock.errors import HeadstockError
from headstock.models.config import ModelConfig
from headstock.offer import Candidate
from headstock.policy import Policy
from headstock.ranking import Ranking
from headstock.requirement import Requirement
from headstock.runner.requirements import layer_groups
from headstock.solver import Group, cover, groups_of, page_sizes

LATENT_TOKENS = (64, 128, 256, 512, 1024, 2048)
"""New tokens of a row, as a step may have them, among which expanding begins to pay."""

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass
class Tuned:
    """What tuning came to: points, in the order measured, what failed, and how many workloads the budget cut off."""

    points: list[Point] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # by backend and role, or by workload, in words
    measured: int = 0
    left: int = 0


class Tuner:
    """Measures the candidates of a model's roles, under every KV configuration on which all roles can be served.

    `policy` narrows the field as in negotiation: what the user fixed is all that is measured. Decoding is captured
    where the device and the backend have graphs and the policy wants them.
    """

    def __init__(
        self, config: ModelConfig, needs: Sequence[Requirement], candidates: Iterable[Candidate], policy: Policy,
        device: Device, *, options: Options | None = None, rounds: int = 7, cold_bytes: int | None = None,
    ):  # fmt: skip
        self.config, self.needs, self.device = config, list(needs), device
        self.candidates = sorted((c for c in candidates if c.usable), key=lambda c: (c.name, c.source))
        self.policy = policy.model_copy(update={"profile": ()})
        self.options, self.rounds, self.cold_bytes = options or {}, rounds, cold_bytes
        self.graph = policy.graph != "off" and device.torch.type != "cpu"
        self.shapes = {group: config.layers[layers[0]] for group, layers in layer_groups(config).items()}

    def contestants(self) -> list[Contestant]:
        """Every candidate for every role under every configuration; none where the model cannot be served."""
        found: dict[tuple[Any, ...], Contestant] = {}
        for each in chain.from_iterable(self._by_configuration()):
            need = each.need
            found.setdefault((need.group, need.role, each.name, need.page_size, need.kv_layout), each)
        return list(found.values())

    def _by_configuration(self) -> Iterator[list[Contestant]]:
        """Who can serve each group under each configuration, the best page size first.

        A page size at which some of those can serve that can at a better one too, and nobody else, is left out.
        """
        groups = groups_of([cover(need, self.candidates, Ranking(self.policy, ())) for need in self.needs], self.policy)
        sizes = sorted(page_sizes(groups, self.policy), key=self.policy.page_rank)
        served: dict[str | None, list[set[tuple[str, ...]]]] = {}
        for size, group in product(sizes, groups):
            for layout in group.layouts:
                able = list(self._at(group, size, layout))
                names: set[tuple[str, ...]] = {(each.need.group, each.need.role, each.name) for each in able}
                better = served.setdefault(layout, [])
                if not any(names <= others for others in better):
                    better.append(names)
                    yield able

    def run(
        self, grid: Sequence[Workload], budget: float = float("inf"),
        report: Report = lambda what, done, total: None,
    ) -> Tuned:  # fmt: skip
        """Measures workload by workload, by turns of the phases and those that cost least first.

        Each is measured on all its contestants, or not at all. `budget` is in seconds. Raises HeadstockError where
        nobody can serve, or where nothing was measured for a role.
        """
        contestants, deadline, tuned = self.contestants(), time.monotonic() + budget, Tuned()
        if not contestants:
            raise HeadstockError("no backend can serve this model here", type="headstock explain")
        for need in (each.need for each in contestants):
            if not any(load.phase == need.phase for load in grid):
                given = ", ".join(load.name for load in grid)
                raise HeadstockError(f"the grid has nothing to {need.phase}", given=given, works=FORMS[need.phase])
        jobs = [(load, group) for load in _in_turn(grid) for group in self.shapes]
        for number, (load, group) in enumerate(jobs):
            report(load.name, number, len(jobs))
            own = [c for c in contestants if (c.need.group, c.need.phase) == (group, load.phase)]
            if not own:
                continue
            with self.device.active():
                points = self._measure(load, own, deadline, tuned)
            tuned.points += points
            tuned.measured += bool(points)
            tuned.left += not points and load.name not in tuned.failures
        report("", len(jobs), len(jobs))
        for need in {(each.need.group, each.need.role): each.need for each in contestants}.values():
            if not any((point.group, point.role) == (need.group, need.role) for point in tuned.points):
                given = "; ".join(tuned.failures.values()) or f"a budget of {budget:g} s"
                works = "another --grid, or a smaller --max-batch" if tuned.failures else "a larger --budget"
                raise HeadstockError(f"nothing was measured for {need.where}", given=given, works=works)
        return tuned

    def profile(self, tuned: Tuned, machine: Machine) -> Profile:
        """The points with everything that they are of."""
        measured = {point.backend for point in tuned.points}
        return Profile(
            device=machine.device,
            driver=machine.driver,
            packages=packages(each for each in self.candidates if each.name in measured),
            shape=shape_of(self.needs),
            options={name: own for name, own in as_text(self.options).items() if name in measured},
            points=tuple(tuned.points),
        )

    def _at(self, group: Group, size: int | None, layout: str | None) -> Iterator[Contestant]:
        """Who can serve the roles of a group at a page size and layout, if all of them can be served."""
        at = {role.key: (size, layout) if role.requirement.cached else (None, None) for role in group.roles}
        fitting = {role.key: [entry for entry in role.entries if entry.fits(*at[role.key])] for role in group.roles}
        if not all(any(fitting[role.key] for role in alternatives) for alternatives in group.alternatives):
            return
        needs = [_settled(role.requirement, *at[role.key]) for role in group.roles]
        cached = next(need for need in needs if need.cached)
        for role, need in zip(group.roles, needs, strict=True):
            for entry in fitting[role.key]:
                graph, expands = self.graph and entry.record.graph, None if need.cached else cached
                yield Contestant(entry.candidate, need, self.shapes[need.group], graph=graph, cached=expands)

    @torch.inference_mode()
    def _measure(self, load: Workload, own: list[Contestant], deadline: float, tuned: Tuned) -> list[Point]:
        """The points of one workload; none once the deadline has passed."""
        scenes, stands = Scenes(self.device, self.candidates, self.cold_bytes), []
        for each in own:
            if time.monotonic() > deadline:
                return []
            key = f"{each.name} for {each.need.where}"
            if key in tuned.failures:
                continue
            try:
                stand = checked(lambda each=each: self._stand(scenes, each, load))  # type: ignore[misc]
            except TooLarge as error:
                tuned.failures[load.name] = str(error)
                return []
            if isinstance(stand, str):
                tuned.failures[key] = f"{key}, {load.name}: {stand}"
                tuned.points = [p for p in tuned.points if (p.backend, p.group, p.role) != _who(each)]
            else:
                stands.append(stand)
        runs = dict(enumerate(stand.run for stand in stands))
        times = by_turns(self.device, runs, self.rounds, lambda: time.monotonic() > deadline)
        return [
            self._point(load, stand, per_layer(times[i], stand).quartiles[0], times[i].spread)
            for i, stand in enumerate(stands)
        ]

    def _stand(self, scenes: Scenes, each: Contestant, load: Workload) -> Stand:
        options = self.options.get(each.name, {})
        graph = self.graph and load.phase == "decode"
        return scenes.stand(each, load, max_context=each.need.max_context, graph=graph, options=options)

    def _point(self, load: Workload, stand: Stand, seconds: float, spread: float) -> Point:
        need = stand.contestant.need
        plan = on_host(self.device, stand.plan, self.rounds).median / need.layers
        return Point(
            group=need.group, role=need.role, backend=stand.contestant.name, page_size=need.page_size,
            kv_layout=need.kv_layout, batch=load.rows, tokens=load.tokens, context=load.context, seconds=seconds,
            plan=plan, spread=spread,
        )  # fmt: skip


def default_grid(max_batch: int, max_context: int, cpu: bool, latent: bool = False) -> list[Workload]:
    """Batches up to `max_batch`, by fours, on two contexts that a device of this kind is used with; and prompts.

    With `latent` attention there are prompts of many lengths after what is cached: its forms cross somewhere there.
    """
    batches = sorted({size for size in (1, 4, 16, 64, 256) if size < max_batch} | {max_batch})
    near, far = (128, 1024) if cpu else (1024, 8192)
    contexts = sorted({min(near, max_context), min(far, max_context)})
    new = min(near if cpu else 512, max_context)
    texts = [f"decode:{rows}x{keys}" for rows in batches for keys in contexts]
    texts += [f"extend:1x{new}", *([f"extend:1x{new}+{far - new}"] if far <= max_context else [])]
    if latent:
        far = min(far, max_context)
        texts += [f"extend:1x{n}+{far - n}" for n in LATENT_TOKENS if n < far]
    return parse(texts)


def parse_budget(text: str) -> float:
    """Seconds of a text such as "60s", "5m" or "90"; HeadstockError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.ASCII)
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise HeadstockError("--budget cannot be read", given=text, works="60s, 5m, 1h")
    return float(match[1]) * UNITS[match[2]]


def _in_turn(grid: Sequence[Workload]) -> list[Workload]:
    """A grid with its phases by turns, each from what costs least to what costs most, so that a budget reaches all."""
    cheapest = sorted(grid, key=lambda load: sum(load.seq_lens) * max(load.query_lens))
    phases = [[load for load in cheapest if load.phase == phase] for phase in ("decode", "extend")]
    return [load for turn in zip_longest(*phases) for load in turn if load is not None]


def _settled(need: Requirement, size: int | None, layout: str | None) -> Requirement:
    return need.model_copy(update={"page_size": size, "kv_layout": layout})


def _who(each: Contestant) -> tuple[str, str, str]:
    return each.name, each.need.group, each.need.role
