"""A stand: one backend on one scene, planned and ready to run, eagerly or as a captured graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headstock.backend import AttentionBackend, BackendSpec, GraphBucket, Progress, Workspace, WorkspaceBytes
from headstock.batch import ForwardBatch
from headstock.bench.latent import LatentScene
from headstock.bench.scene import Scene
from headstock.bench.workload import Workload
from headstock.device import Device
from headstock.kv.layout import KVLayout
from headstock.load import load_backend, load_layout, load_options
from headstock.models.config import LayerShape
from headstock.offer import Candidate
from headstock.requirement import Requirement
from headstock.runner.latent import MAX_CHUNKS
from headstock.runner.requirements import backend_spec

Described = Mapping[str, str | int | bool]


@dataclass(frozen=True)
class Contestant:
    """A backend for one role of one layer group under one KV configuration, which `need` has settled.

    One that expands latent vectors reads them where `cached`, another role's need, has them. In extending, both forms
    of latent attention are run whole.
    """

    candidate: Candidate
    need: Requirement
    shape: LayerShape
    cascade: bool = False  # its record reads shared prefixes once
    graph: bool = False  # its record can be captured
    flat: bool = False  # it reads shared prefixes once per row here, though it need not
    cached: Requirement | None = None

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def configuration(self) -> tuple[int | None, str | None]:
        """Page size and KV layout of the cache that is read."""
        cache = self.cached or self.need
        return cache.page_size, cache.kv_layout

    @property
    def whole(self) -> bool:
        """Whether a form of latent attention is run whole."""
        return self.shape.latent is not None and self.need.phase == "extend"

    def spec(
        self, device: Device, workload: Workload, max_context: int, options: Mapping[str, Any], graph: bool
    ) -> BackendSpec:
        """The spec of an instance that serves `workload` and no more."""
        assert self.candidate.offer is not None, "a contestant can be used"
        levels = 1 if self.cascade and workload.shared else 0
        spec = backend_spec(
            [self.need.model_copy(update={"max_context": max(max_context, workload.context)})],
            self.shape,
            device=str(device.torch),
            num_sms=device.num_sms,
            max_batch=workload.rows,
            max_tokens=workload.tokens,
            max_plans=1 if self.need.cached else 1 + MAX_CHUNKS,
            max_levels=levels,
            options=load_options(self.candidate.offer, options),
        )
        return replace(spec, graph_buckets=(GraphBucket(workload.rows, 1, levels),)) if graph else spec


class Stand:
    """A contestant's instance on `scene`, which it may share with others of its KV configuration.

    `run` does the layers of the scene once, `plan` what the host does before them. A captured stand replays a graph.
    """

    def __init__(
        self, contestant: Contestant, scene: Scene, spec: BackendSpec, *,
        report: Callable[[Progress], None] = lambda progress: None,
    ):  # fmt: skip
        self.contestant, self.scene, self.graph = contestant, scene, bool(spec.graph_buckets)
        backend_class = load_backend(contestant.candidate)
        backend_class.prepare(spec, report)
        sizes = WorkspaceBytes(*backend_class.workspace_bytes(spec))
        self.backend: AttentionBackend = backend_class(spec, Workspace(*(_aligned(n, spec.device) for n in sizes)))
        levels = scene.levels if spec.max_levels else ()
        self.batch: ForwardBatch = replace(scene.batch, shared_levels=levels, metadata=None, _csr={})
        if self.graph:
            self.batch = replace(self.batch, max_seq_len=spec.max_context, graph="capture")
        self._replay = self._captured() if self.graph else None
        self.plan()
        self.described: Described = dict(self.backend.describe(self._planned))

    @property
    def _planned(self) -> ForwardBatch:
        return self.batch

    def plan(self) -> None:
        """What the host does once per forward."""
        if self.graph:
            self.backend.init_forward_metadata_replay_cuda_graph(self.batch)
        else:
            self.backend.init_forward_metadata(self.batch)
            self.backend.init_forward_metadata_in_graph(self.batch)

    def run(self) -> None:
        """Every layer of the scene, as one forward has them."""
        if self._replay is not None:
            self._replay()
        else:
            self._layers()

    def check(self) -> None:
        """Runs once and compares with the float64 reference; raises AssertionError where they differ."""
        self.scene.out.fill_(float("nan"))
        self.run()
        self.scene.device.synchronize()
        self.scene.check()

    def _layers(self) -> None:
        scene = self.scene
        for layer in scene.layers:
            self.backend.forward(scene.q, scene.k, scene.v, layer, self.batch, out=scene.out)

    def _captured(self) -> Callable[[], None]:
        device = self.scene.device
        self.backend.init_cuda_graph_state([self.batch])
        self.backend.init_forward_metadata_capture_cuda_graph(self.batch)

        def run() -> None:
            self.backend.init_forward_metadata_in_graph(self.batch)
            self._layers()

        with device.warming_up():
            run()
            run()
        gc.collect()
        collects = gc.isenabled()
        gc.disable()  # freeing a tensor of another pool breaks a capture
        try:
            captured = device.capture(run)
        finally:
            if collects:
                gc.enable()
        self.batch.graph = "replay"
        return captured.replay


class FormStand(Stand):
    """A stand of latent attention in one form, with all that it does beside the backend; `plan` cuts the chunks too."""

    scene: LatentScene

    def plan(self) -> None:
        self.segment = self.scene.segment(self.backend, self.batch, self.contestant.need.attention == "mla")
        self.segment.plan()

    def _layers(self) -> None:
        scene = self.scene
        for layer in scene.layers:
            self.segment.run(scene.q, scene.k, scene.up, layer, scene.out)

    @property
    def _planned(self) -> ForwardBatch:
        return self.segment.batch


class Scenes:
    """The scenes of one workload, one for each KV configuration and way to lay things out, made when asked for."""

    def __init__(self, device: Device, candidates: Iterable[Candidate], cold_bytes: int | None = None):
        self.device, self.candidates, self.cold_bytes = device, list(candidates), cold_bytes
        self._scenes: dict[tuple[object, ...], Scene] = {}

    def stand(
        self, contestant: Contestant, workload: Workload, *, max_context: int = 0, graph: bool = False,
        options: Mapping[str, Any] | None = None, scattered: bool = True, packed: bool = False,
    ) -> Stand:  # fmt: skip
        """A contestant on its scene; it raises whatever its backend does."""
        spec = contestant.spec(self.device, workload, max_context, options or {}, graph and contestant.graph)
        width = spec.max_context if spec.graph_buckets else 0
        of = spec
        if contestant.cached is not None:
            of = replace(contestant, need=contestant.cached).spec(self.device, workload, max_context, {}, False)
        key = (workload, contestant.need.group, of.attention, *contestant.configuration, scattered, packed, width)
        if key not in self._scenes:
            layout: type[KVLayout] = load_layout(of.kv_layout, self.candidates)
            lies: dict[str, Any] = {"scattered": scattered, "packed": packed, "cold_bytes": self.cold_bytes}
            if contestant.whole:
                self._scenes[key] = LatentScene(of, layout, workload, contestant.shape, **lies)
            else:
                self._scenes[key] = Scene(of, layout, workload, whole_table=width > 0, **lies)
        return (FormStand if contestant.whole else Stand)(contestant, self._scenes[key], spec)

    def clear(self) -> None:
        """Lets go of all caches, before the next workload's are made."""
        self._scenes.clear()


def _aligned(num_bytes: int, device: str) -> Tensor:
    """Zeroed memory uint8 [num_bytes] at a multiple of 256."""
    memory = torch.zeros(num_bytes + 256, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 256
    return memory[start : start + num_bytes]
