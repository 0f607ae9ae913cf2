"""The diagnosis: a model's chosen backends measured beside what could be, for a workload, an engine or its trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from headstock.bench.compare import Comparison, Measured, Options, Report, checked, per_layer
from headstock.bench.findings import (
    SMALL_PAGE,
    Finding,
    graphs_not_used,
    kernel_mismatch,
    memory_pressure,
    never_captured,
    not_contiguous,
    planning_dominates,
    sharing_unused,
    traced_graphs,
    wrong_backend,
)
from headstock.bench.recorded import Forward, representatives
from headstock.bench.scene import TooLarge
from headstock.bench.stand import Contestant, Scenes, Stand
from headstock.bench.timing import Times, by_turns, on_host
from headstock.bench.workload import Workload
from headstock.decision import Choice, Decision
from headstock.device import Device
from headstock.models.config import LayerShape, ModelConfig
from headstock.offer import Candidate
from headstock.policy import Policy
from headstock.runner.requirements import layer_groups

if TYPE_CHECKING:
    from headstock.engine.engine import Engine


class Diagnosis:
    """Looks for what makes attention slow where `decision` says who serves; `candidates` are all there are.

    What was decided is timed by turns beside every valid backend, each under the KV configuration that suits it best,
    and beside itself on data that lies otherwise.
    """

    def __init__(
        self, config: ModelConfig, decision: Decision, candidates: Iterable[Candidate], device: Device, *,
        options: Options | None = None, graph: bool | None = None, rounds: int = 7, cold_bytes: int | None = None,
    ):  # fmt: skip
        self.config, self.decision, self.device = config, decision, device
        self.candidates, self.options = list(candidates), options or {}
        self.rounds, self.cold_bytes = rounds, cold_bytes
        self.field = Comparison(config, decision.requirements, self.candidates, Policy(), device, graph=graph)

    def of_workloads(
        self, workloads: Sequence[Workload], report: Report = lambda what, done, total: None
    ) -> list[Finding]:
        """What is found on these workloads, what costs most first."""
        groups = {group: self.config.layers[layers[0]] for group, layers in layer_groups(self.config).items()}
        jobs = [(load, group, shape) for load in workloads for group, shape in groups.items()]
        found: list[Finding] = []
        for number, (load, group, shape) in enumerate(jobs):
            report(load.name, number, len(jobs))
            with self.device.active():
                found += self._one(load, group, shape)
        report("", len(jobs), len(jobs))
        return in_order(found)

    def of_trace(self, forwards: Sequence[Forward], report: Report = lambda what, done, total: None) -> list[Finding]:
        """What a recorded run shows, and what is found on the workloads that stand for it."""
        return in_order([*traced_graphs(forwards), *self.of_workloads(representatives(forwards), report)])

    @torch.inference_mode()
    def _one(self, load: Workload, group: str, shape: LayerShape) -> Iterator[Finding]:
        """What is found of each role that would run this; extending latent attention, there are two."""
        for choice in self.decision.choices:
            if choice.winners and (choice.group, choice.requirement.phase) == (group, load.phase):
                yield from self._of(choice, load, shape)

    def _of(self, choice: Choice, load: Workload, shape: LayerShape) -> Iterator[Finding]:
        winner = choice.winner(load.rows)
        scenes = Scenes(self.device, self.candidates, self.cold_bytes)
        candidate = next(each for each in self.candidates if each.name == winner.backend and each.usable)
        once = "cascade" in winner.granted or choice.requirement.cascade
        graph = "graph" in winner.granted or choice.requirement.graph
        cached = None if choice.requirement.cached else self.decision.cached(choice.group)
        chosen = Contestant(candidate, choice.requirement, shape, cascade=once, graph=graph, cached=cached)
        where = f"{choice.requirement.where}, {load.name}"
        try:
            own = self._own(scenes, chosen, load)
        except TooLarge as error:
            cure = "a smaller workload, or --kv-tokens that leave an engine's device room to measure"
            yield Finding("memory pressure", where, f"it cannot be measured: {error}", cure)
            return
        if isinstance(own, str):
            yield Finding(
                "wrong backend", where, f"{winner.backend} fails: {own}", "another backend, or headstock check"
            )
            return
        captured = self._captured(scenes, chosen, load)
        stands = {"own": own, **captured, **self._variants(scenes, chosen, load), **self._rivals(scenes, chosen, load)}
        times = by_turns(self.device, {name: stand.run for name, stand in stands.items()}, self.rounds)
        each = {name: per_layer(times[name], stand) for name, stand in stands.items()}
        rivals = {name.removeprefix("rival "): t for name, t in each.items() if name.startswith("rival ")}
        yield from wrong_backend(where, winner.backend, winner.why, each["own"], rivals)
        yield from kernel_mismatch(where, winner.backend, choice.requirement, own.described)
        if load.phase == "decode" and self.field.graph and not chosen.graph:
            yield from never_captured(where, winner.backend, each["own"], each.get("captured"))
        variants = {name: t for name, t in each.items() if name in ("packed", "ordered", "paged")}
        yield from not_contiguous(where, each["own"], variants, choice.requirement.page_size)
        yield from self._planning(where, own, choice, each["own"])
        if load.shared and not once and not shape.window:
            why = f"{winner.backend} reads rows apart"
            cure = "--cascade auto, and a backend that declares cascade"
            yield from sharing_unused(where, load.rows, load.shared, load.context - load.shared, why, cure)

    def _planning(self, where: str, own: Stand, choice: Choice, layer: Times) -> Iterator[Finding]:
        plan = on_host(self.device, own.plan, self.rounds).median
        cure = "a backend that plans on the device or less, or longer steps: more requests at once"
        yield from planning_dominates(where, plan, layer.median, choice.requirement.layers, cure)

    def _captured(self, scenes: Scenes, chosen: Contestant, load: Workload) -> dict[str, Stand]:
        """The chosen backend as a graph, where it is launched eagerly and need not be."""
        need, offer = chosen.need.model_copy(update={"graph": True}), chosen.candidate.offer
        able = offer is not None and any(not need.unmet(record) for record in offer.capabilities)
        if load.phase != "decode" or chosen.graph or not self.field.graph or not able:
            return {}
        stand = self._stand(scenes, replace(chosen, graph=True), load)
        return {"captured": stand} if isinstance(stand, Stand) else {}

    def _variants(self, scenes: Scenes, chosen: Contestant, load: Workload) -> dict[str, Stand]:
        """The chosen backend on data that lies otherwise, as far as it takes that."""
        tries: dict[str, tuple[Contestant, dict[str, Any]]] = {
            "packed": (chosen, {"packed": True}),
            "ordered": (chosen, {"scattered": False}),
        }
        size = chosen.need.page_size or 0
        larger = chosen.need.model_copy(update={"page_size": SMALL_PAGE})
        offer = chosen.candidate.offer
        if 0 < size < SMALL_PAGE and offer and any(not larger.unmet(record) for record in offer.capabilities):
            tries["paged"] = (Contestant(chosen.candidate, larger, chosen.shape, chosen.cascade, chosen.graph), {})
        made = {name: self._stand(scenes, who, load, **how) for name, (who, how) in tries.items()}
        return {name: stand for name, stand in made.items() if isinstance(stand, Stand)}

    def _rivals(self, scenes: Scenes, chosen: Contestant, load: Workload) -> dict[str, Stand]:
        """Every other valid backend, and the chosen one where it would read a shared prefix in its other way."""
        found = {}
        for each in self.field.contestants(load, chosen.need.group, chosen.shape):
            same = isinstance(each, Contestant) and (each.name, each.cascade) == (chosen.name, chosen.cascade)
            if isinstance(each, Measured) or same or (each.name == chosen.name and not load.shared):
                continue
            if each.need.role != chosen.need.role:
                continue
            stand = self._stand(scenes, each, load)
            if isinstance(stand, Stand):
                found[f"rival {each.name}{', flat' if each.flat else ''}"] = stand
        return found

    def _stand(self, scenes: Scenes, each: Contestant, load: Workload, **how: bool) -> Stand | str:
        try:
            return self._own(scenes, each, load, **how)
        except TooLarge as error:
            return str(error)

    def _own(self, scenes: Scenes, each: Contestant, load: Workload, **how: bool) -> Stand | str:
        options = self.options.get(each.name, {})
        graph = self.field.graph and load.phase == "decode"
        context = each.need.max_context
        return checked(lambda: scenes.stand(each, load, graph=graph, options=options, max_context=context, **how))


def diagnose(
    engine: Engine, workloads: Sequence[Workload] | None = None, *, options: Options | None = None, rounds: int = 7,
    cold_bytes: int | None = None,
) -> list[Finding]:  # fmt: skip
    """What makes attention slow in an engine of this process, from what it counted and what it runs now.

    `workloads` are measured, by default one like the rows that decode at the moment; none, an empty sequence, leaves it
    at what was counted. Measuring takes memory beside the engine's own, and its device while no step runs.
    """
    runner = engine.runner
    found = [*_graphs(engine), *_pressure(engine), *_sharing(engine)]
    if workloads is None:
        lens = [runner.pages.length(request.slot) for request in engine.scheduler.running]
        lens = [length for length in lens if length]
        name = f"{len(lens)} rows that run now"
        workloads = [Workload("decode", (1,) * len(lens), tuple(lens), name=name)] if lens else []
    diagnosis = Diagnosis(
        runner.config, runner.decision, runner.candidates, runner.device, options=options, rounds=rounds,
        cold_bytes=cold_bytes,
    )  # fmt: skip
    return in_order([*found, *diagnosis.of_workloads(workloads)])


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Findings by what they cost, those of which it is not known last, and each once."""
    unique: Mapping[tuple[str, str, str], Finding] = {(f.kind, f.where, f.evidence): f for f in findings}
    return sorted(unique.values(), key=lambda finding: -finding.gain)


def _graphs(engine: Engine) -> Iterator[Finding]:
    graphs, runner = engine.runner.graphs, engine.runner
    if graphs is not None:
        sizes = sorted({bucket.batch for bucket in graphs.static.buckets})
        yield from graphs_not_used(graphs.fallbacks, graphs.replays.total(), sizes)
    elif runner.device.torch.type != "cpu" and engine.stats.decode_tokens:
        off = [line for line in runner.decision.ungranted if line.startswith("graph ")] or ["--graph off"]
        evidence = f"all {engine.stats.steps} steps ran eagerly: {'; '.join(off)}"
        yield Finding("graphs not used", "decode", evidence, "--graph auto, and a backend that declares graph")


def _pressure(engine: Engine) -> Iterator[Finding]:
    stats, memory = engine.stats, engine.runner.memory
    workspaces = memory.scratch + memory.state
    yield from memory_pressure(
        stats.preemptions, stats.steps, stats.free_pages, stats.pages, workspaces, memory.kv_cache
    )


def _sharing(engine: Engine) -> Iterator[Finding]:
    """Prompts with a common beginning that is run or read once per request."""
    runner, scheduler = engine.runner, engine.scheduler
    requests = [*scheduler.running, *scheduler.waiting]
    common, size = _common([request.ids for request in requests]), runner.page_size
    own = max((len(request.ids) for request in requests), default=0) - common
    if common < size:
        return
    if not scheduler.prefix_cache:
        why, cure = "the prefix cache is off", "Engine(prefix_cache=True)"
        yield from sharing_unused("prompts", len(requests), common, own, why, cure)
        return
    rows = max(len(scheduler.running), 1)
    decoding = [servers.at(rows) for (_, role), servers in runner.roles.items() if role == "decode"]
    shared = min((len(runner.pages.shared(request.slot)) * size for request in scheduler.running), default=0)
    if not any(instance.spec.max_levels for instance in decoding) and shared:
        why = f"{', '.join({each.candidate.name for each in decoding})} was not told of them"
        cure = "--cascade auto, and a backend that declares cascade"
        yield from sharing_unused("decode", len(scheduler.running), min(shared, common), own, why, cure)


def _common(prompts: Sequence[Sequence[int]]) -> int:
    """The tokens with which all of these begin, where there are several."""
    if len(prompts) < 2:
        return 0
    first, last = (
        min(prompts, key=tuple),
        max(prompts, key=tuple),
    )  # in order, what these two share, all between them do
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
