"""The comparison: backends on the same workloads, checked against the reference first and then timed by turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headstock.bench.scene import TooLarge
from headstock.bench.stand import Contestant, Described, Scenes, Stand
from headstock.bench.timing import Limits, Times, by_turns, on_host
from headstock.bench.workload import Work, Workload
from headstock.device import Device, torch_dtype
from headstock.errors import HeadstockError
from headstock.models.config import LayerShape, ModelConfig
from headstock.negotiate import negotiate
from headstock.offer import Candidate
from headstock.plugins import describe_fault
from headstock.policy import Policy
from headstock.prints import stdout_to_stderr
from headstock.requirement import Requirement
from headstock.runner.requirements import layer_groups

PAGE_SIZE = 64
"""Tokens of a page of latent vectors where nobody says: expanding gathers them, whatever their pages are."""

Report = Callable[[str, int, int], None]
Options = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one backend came to on one workload of one layer group: seconds of one layer, or why there are none.

    `flat` tells that it read keys in common once per row, though it can read them once for all, and `expanded` that it
    attended to keys made of latent vectors. `host` are seconds of planning, once per forward. `work` is what a layer
    has to do at least. `source` is the distribution and version. A `failure` is a refusal, an error, or wrong numbers.
    """

    workload: Workload
    group: str
    backend: str
    source: str
    work: Work
    page_size: int | None = None
    kv_layout: str | None = None
    graph: bool = False
    flat: bool = False
    expanded: bool = False
    device: Times | None = None
    host: Times | None = None
    described: Described | None = None
    failure: str = ""

    @property
    def label(self) -> str:
        """The backend, told apart from itself where it reads in two ways."""
        return f"{self.backend}{', flat' if self.flat else ''}{', expanded' if self.expanded else ''}"

    def share(self, limits: Limits) -> tuple[float, str]:
        """The larger part of a measured limit that it reaches, and which limit."""
        assert self.device is not None, "asked of what was timed"
        return limits.share(*self.work, self.device.median)

    def as_dict(self, limits: Limits) -> dict[str, Any]:
        """The figures as plain data; seconds, bytes and FLOPs are of one layer."""
        load = self.workload
        sizes = {"rows": load.rows, "tokens": load.tokens, "context": load.context, "shared": load.shared}
        where = {"workload": load.name, "phase": load.phase, **sizes, "weight": load.weight, "group": self.group}
        by = {
            "backend": self.backend,
            "source": self.source,
            "expanded": self.expanded,
            "page_size": self.page_size,
            "kv_layout": self.kv_layout,
        }
        if self.device is None or self.host is None:
            return {**where, **by, "failure": self.failure}
        share, limit = self.share(limits)
        figures = {
            "seconds": self.device.median,
            "quartiles": self.device.quartiles,
            "samples": self.device.samples,
            "plan_seconds": self.host.median,
            "bytes": self.work.num_bytes,
            "flops": self.work.flops,
            "of_limit": round(share, 4),
            "limit": limit,
        }
        return {**where, **by, "graph": self.graph, "flat": self.flat, **figures, "kernel": self.described}


class Comparison:
    """Measures backends on a model's layers, each under the KV configuration that suits it best.

    `needs` ask for the device and dtype; `policy` may fix backends, page size and layout. Decode steps are captured, of
    backends that declare it, where the device has graphs of its own, or as `graph` says. A scene is as cold as
    `cold_bytes` make it.
    """

    def __init__(
        self, config: ModelConfig, needs: Sequence[Requirement], candidates: Iterable[Candidate], policy: Policy,
        device: Device, *, options: Options | None = None, graph: bool | None = None, rounds: int = 9,
        cold_bytes: int | None = None,
    ):  # fmt: skip
        self.config, self.needs, self.candidates = config, list(needs), list(candidates)
        self.policy, self.device, self.options = policy, device, options or {}
        self.graph = (device.torch.type != "cpu" if graph is None else graph) and policy.graph != "off"
        self.rounds, self.cold_bytes = rounds, cold_bytes

    def run(self, workloads: Sequence[Workload], report: Report = lambda what, done, total: None) -> list[Measured]:
        """Every workload × layer group × backend; HeadstockError where the policy names none of these backends."""
        for need in self.needs:
            if any(load.phase == need.phase for load in workloads):
                self._check_chosen(need)
        found: list[Measured] = []
        groups = [(name, self.config.layers[layers[0]]) for name, layers in layer_groups(self.config).items()]
        total = len(workloads) * len(groups)
        for number, (load, (group, shape)) in enumerate((w, g) for w in workloads for g in groups):
            report(load.name, number, total)
            with self.device.active():
                found += self._one(load, group, shape)
        report("", total, total)
        return found

    def contestants(self, load: Workload, group: str, shape: LayerShape) -> Iterator[Contestant | Measured]:
        """Each backend as it would serve a role alone, or the reason why it cannot; latent attention has two to extend.

        One that can read keys in common once is tried in both ways: which is faster depends on how many there are.
        """
        cached = self._need(load, group)
        yield from self._contestants(load, cached, shape, None)
        for need in self.needs:
            if not need.cached and (need.group, need.phase) == (group, load.phase):
                at = {
                    "page_size": self.policy.page_size or PAGE_SIZE,
                    "kv_layout": self.policy.layout(group) or "latent",
                }
                yield from self._contestants(load, need, shape, cached.model_copy(update=at))

    def _contestants(
        self, load: Workload, need: Requirement, shape: LayerShape, cached: Requirement | None
    ) -> Iterator[Contestant | Measured]:
        wishes = (*(("graph",) if self.graph else ()), *(("cascade",) if load.shared and not shape.window else ()))
        need = need.model_copy(update={"wishes": wishes, "max_context": max(need.max_context, load.context)})
        work, group = self._work(load, need), need.group
        policy = self.policy.model_copy(update={"profile": ()})
        for candidate in self.candidates:
            decision = negotiate([need], [candidate], policy.model_copy(update={"backends": {}}))
            if cached is not None and not candidate.usable:
                continue  # as was told of the other form
            chosen = self.policy.chosen(need)
            if chosen is not None and not candidate.answers_to(chosen[1]):
                continue
            if decision.solved:
                (choice,) = decision.choices
                graph, once = ("graph" in choice.winners[0].granted, "cascade" in choice.winners[0].granted)
                for cascade in (True, False) if once else (False,):
                    flat = once and not cascade
                    yield Contestant(candidate, choice.requirement, shape, cascade, graph, flat, cached)
                continue
            (refused,) = decision.refused or (None,)
            reason = refused and (refused.fault or refused.closest)
            failure, source = str(reason or "refused"), candidate.source
            yield Measured(load, group, candidate.name, source, work, expanded=cached is not None, failure=failure)

    def _check_chosen(self, need: Requirement) -> None:
        chosen = self.policy.chosen(need)
        if chosen is not None and not any(each.answers_to(chosen[1]) for each in self.candidates):
            what = f"{self.policy.origin(chosen[0])} names none of the backends to time"
            raise HeadstockError(what, given=chosen[1], works=", ".join(each.name for each in self.candidates))

    def _need(self, load: Workload, group: str) -> Requirement:
        """The role of a group that runs a workload over its cache."""
        return next(each for each in self.needs if each.cached and (each.group, each.phase) == (group, load.phase))

    def _work(self, load: Workload, need: Requirement) -> Work:
        """What attention itself has to do; keys are read as they are cached."""
        sizes = torch_dtype(need.dtype).itemsize, torch_dtype(need.kv_dtype).itemsize
        own = load.work(need, *sizes)
        return own if need.cached else Work(load.work(self._need(load, need.group), *sizes).num_bytes, own.flops)

    @torch.inference_mode()
    def _one(self, load: Workload, group: str, shape: LayerShape) -> list[Measured]:
        """All backends on one workload, which share caches where their configurations agree."""
        scenes = Scenes(self.device, self.candidates, self.cold_bytes)
        failed, stands = [], []
        for each in self.contestants(load, group, shape):
            if isinstance(each, Measured):
                failed.append(each)
            elif isinstance(stand := self._stand(scenes, each, load), str):
                work, expanded = self._work(load, each.need), each.cached is not None
                failed.append(
                    Measured(load, group, each.name, each.candidate.source, work, expanded=expanded, failure=stand)
                )
            else:
                stands.append(stand)
        device = by_turns(self.device, dict(enumerate(stand.run for stand in stands)), self.rounds)
        measured = [
            Measured(
                load, group, stand.contestant.name, stand.contestant.candidate.source,
                self._work(load, stand.contestant.need), *stand.contestant.configuration, stand.graph,
                stand.contestant.flat, stand.contestant.cached is not None, per_layer(device[i], stand),
                on_host(self.device, stand.plan, self.rounds), stand.described,
            )
            for i, stand in enumerate(stands)
        ]  # fmt: skip
        return [*measured, *failed]

    def _stand(self, scenes: Scenes, each: Contestant, load: Workload) -> Stand | str:
        options = self.options.get(each.name, {})
        graph = self.graph and load.phase == "decode"
        try:
            return checked(lambda: scenes.stand(each, load, graph=graph, options=options))
        except TooLarge as error:
            return str(error)


def checked(make: Callable[[], Stand]) -> Stand | str:
    """A stand whose numbers are right, or in a line why there is none: whatever it raises is the backend's failure.

    Raises TooLarge, which is nobody's.
    """
    try:
        with stdout_to_stderr():
            stand = make()
            stand.check()
        return stand
    except (KeyboardInterrupt, TooLarge):
        raise
    except AssertionError as error:
        return f"wrong numbers: {error}"
    except BaseException as error:
        return describe_fault(error).what


def per_layer(times: Times, stand: Stand) -> Times:
    """The times of all layers of a stand's scene as those of one."""
    return Times(tuple(seconds / len(stand.scene.layers) for seconds in times.samples))
