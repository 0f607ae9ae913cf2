"""The backend instances of one runner: loaded from a decision, given their workspaces, probed with tiny batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstock.backend import AttentionBackend, BackendSpec, GraphBucket, Phase, Report, Workspace, WorkspaceBytes
from headstock.batch import ForwardBatch
from headstock.decision import Choice, Decision
from headstock.device import Device, torch_dtype
from headstock.errors import HeadstockError, PluginError
from headstock.kv.layout import KVLayout
from headstock.kv.pool import KVPool
from headstock.layer import AttentionLayer
from headstock.load import load_backend, load_layout, load_options
from headstock.models.config import ModelConfig
from headstock.offer import Candidate
from headstock.plugins import describe_fault
from headstock.requirement import Requirement
from headstock.runner.latent import MAX_CHUNKS
from headstock.runner.limits import Limits
from headstock.runner.requirements import backend_spec, layer_groups

ALIGNMENT = 256
GRAPH_LEVELS = 1
"""Levels of shared prefixes that are captured, once more for each size: a system prompt is most of what is shared."""


class FaultyBackend(HeadstockError):
    """A chosen backend failed to load, to start or to pass its probe; the cause says why.

    `candidate` is which, `group` and `phases` are what it was to serve.
    """

    def __init__(self, candidate: Candidate, error: BaseException, group: str, phases: frozenset[str]):
        what = describe_fault(error).what
        if not isinstance(error, PluginError):  # which says itself whose it is
            what = f"the backend {candidate.name} ({candidate.source}) failed: {what}"
        super().__init__(what)
        self.candidate, self.error = candidate, error
        self.group, self.phases = group, phases

    @property
    def look(self) -> str | None:
        """What to type to see more, of what is installed: `doctor` loads backends, `check` runs them."""
        if not self.candidate.distribution:
            return None
        return "headstock doctor" if isinstance(self.error, PluginError) else f"headstock check {self.candidate.name}"

    def remains(self, phases: frozenset[str]) -> Candidate:
        """The candidate as it may still be chosen: for these phases alone; with its fault where there are none."""
        offer = self.candidate.offer
        assert offer is not None, "a backend that was chosen has an offer"
        if not phases:
            return self.candidate.failed(describe_fault(self.error, self.look or ""))
        records = tuple(each.model_copy(update={"phases": each.phases & phases}) for each in offer.capabilities)
        return self.candidate.model_copy(update={"offer": offer.model_copy(update={"capabilities": records})})


@dataclass(slots=True)
class Instance:
    """One backend for one layer group and attention kind: what it was specified as, and what it became."""

    candidate: Candidate
    spec: BackendSpec
    backend_class: type[AttentionBackend]
    layout: type[KVLayout] | None  # None where nothing is cached
    bytes: WorkspaceBytes
    bytes_per_page: int  # of one layer's cache
    backend: AttentionBackend | None = field(default=None)

    def start(self, scratch: Tensor) -> None:
        """Constructs the backend, with its own zeroed state beside as much of the shared scratch as it asked for."""
        workspace = Workspace(scratch[: self.bytes.scratch], _aligned(self.bytes.state, self.spec.device))
        self.backend = self.backend_class(self.spec, workspace)


@dataclass(frozen=True, slots=True)
class Servers:
    """Who serves one role: instances, each for batches of at most so many rows; the last one serves any (None).

    All of them read one cache.
    """

    by_rows: tuple[tuple[int | None, Instance], ...]

    def at(self, rows: int) -> Instance:
        """The instance that serves batches of so many rows."""
        return next(each for most, each in self.by_rows if most is None or rows <= most)

    @property
    def instances(self) -> list[Instance]:
        """Each of them once."""
        return list({id(each): each for _, each in self.by_rows}.values())

    @property
    def first(self) -> Instance:
        """One of them, for what is the same of all: the window, and how the cache is laid out."""
        return self.by_rows[0][1]


Roles = Mapping[tuple[str, str], Servers]
"""Who serves, by (group, role)."""


def load_instances(
    decision: Decision,
    candidates: Iterable[Candidate],
    config: ModelConfig,
    device: Device,
    limits: Limits,
    options: Mapping[str, Mapping[str, Any]],
) -> Roles:
    """Who serves each role, one instance per (group, backend, attention kind). Raises FaultyBackend for what fails.

    Winners for more rows than there can be are left out.
    """
    field = list(candidates)
    by_name = {candidate.name: candidate for candidate in field if candidate.usable}
    groups = layer_groups(config)
    buckets = _buckets(decision, by_name, limits)
    made: dict[tuple[str, str, str], Instance] = {}
    roles: dict[tuple[str, str], Servers] = {}
    for choice in decision.choices:
        servers = []
        for winner in choice.within(limits.max_batch):
            key = (choice.group, winner.backend, choice.requirement.attention)
            if key not in made:
                own = _Share.of(decision, key, limits.max_batch)
                candidate, phases = by_name[winner.backend], frozenset(need.phase for need in own.needs)
                spec = backend_spec(
                    own.needs,
                    config.layers[groups[choice.group][0]],
                    device=str(device.torch),
                    num_sms=device.num_sms,
                    max_batch=own.max_batch,
                    max_tokens=limits.max_tokens,
                    max_plans=limits.max_plans if choice.requirement.cached else 1 + MAX_CHUNKS,
                    max_levels=limits.max_levels if _reads_once(candidate, own.needs) else 0,
                    graph_buckets=tuple(bucket for bucket in buckets if own.decodes(bucket.batch)),
                    options=_options(candidate, options.get(candidate.name, {}), choice.group, phases),
                )
                made[key] = _load(candidate, spec, field)
            servers.append((winner.max_batch, made[key]))
        if servers:
            roles[choice.group, choice.role] = Servers((*servers[:-1], (None, servers[-1][1])))
    return roles


class _Share(NamedTuple):
    """What one instance serves: some choices of a group and attention kind, of which it is a winner."""

    backend: str
    choices: list[Choice]
    max_batch: int

    @classmethod
    def of(cls, decision: Decision, key: tuple[str, str, str], max_batch: int) -> _Share:
        group, backend, attention = key
        alike = [each for each in decision.choices if (each.group, each.requirement.attention) == (group, attention)]
        own = [(each, winner) for each in alike for winner in each.within(max_batch) if winner.backend == backend]
        most = max(max_batch if winner.max_batch is None else winner.max_batch for _, winner in own)
        return cls(backend, list({each.role: each for each, _ in own}.values()), min(most, max_batch))

    @property
    def needs(self) -> list[Requirement]:
        return [choice.requirement for choice in self.choices]

    def decodes(self, rows: int) -> bool:
        """Whether it serves decode batches of so many rows."""
        decoding = [choice for choice in self.choices if choice.requirement.phase == "decode"]
        return any(choice.winner(rows).backend == self.backend for choice in decoding)


def _buckets(decision: Decision, candidates: Mapping[str, Candidate], limits: Limits) -> list[GraphBucket]:
    """What is captured: each size, where every backend that decodes can be, and once more where levels are read once.

    A graph holds a whole step.
    """
    decoding = [choice for choice in decision.choices if choice.requirement.phase == "decode"]
    able = (
        _declares(candidates[winner.backend], choice.requirement, "graph")
        for choice in decoding
        for winner in choice.within(limits.max_batch)
    )
    if not decoding or not all(able):
        return []
    buckets = []
    for size in limits.graph_sizes:
        winners = [(candidates[choice.winner(size).backend], choice.requirement) for choice in decoding]
        shares = any(_reads_once(candidate, [need]) for candidate, need in winners)
        levels = range(1 + (min(limits.max_levels, GRAPH_LEVELS) if shares else 0))
        buckets += [GraphBucket(size, levels=count) for count in levels if size > count]
    return buckets


def _declares(candidate: Candidate, need: Requirement, feature: str) -> bool:
    """Whether a backend declares a feature together with all that it serves."""
    assert candidate.offer is not None, "a winner has an offer"
    asked = need.model_copy(update={feature: True})
    return any(not asked.unmet(record) for record in candidate.offer.capabilities)


def _reads_once(candidate: Candidate, needs: Iterable[Requirement]) -> bool:
    """Whether a backend that decodes without a window declares cascade for all that it serves."""
    needs = list(needs)
    return any(need.phase == "decode" and not need.sliding_window for need in needs) and all(
        _declares(candidate, need, "cascade") for need in needs
    )


def _options(candidate: Candidate, given: Mapping[str, Any], group: str, phases: frozenset[str]) -> Any:
    """A backend's options; those that the user gave are the user's fault, not the backend's."""
    assert candidate.offer is not None, "a winner has an offer"
    try:
        return load_options(candidate.offer, given)
    except PluginError as error:
        if given:
            raise
        raise FaultyBackend(candidate, error, group, phases) from error


def _load(candidate: Candidate, spec: BackendSpec, candidates: list[Candidate]) -> Instance:
    try:
        backend_class = load_backend(candidate)
        layout = load_layout(spec.kv_layout, candidates) if spec.page_size else None
        wanted = WorkspaceBytes(*backend_class.workspace_bytes(spec))
        return Instance(candidate, spec, backend_class, layout, wanted, layout.bytes_per_page(spec) if layout else 0)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise FaultyBackend(candidate, error, spec.group, spec.phases) from error


def start_and_probe(instances: Sequence[Instance], device: Device, report: Report = lambda progress: None) -> None:
    """Prepares and constructs each instance and runs a tiny batch of each of its phases.

    Raises FaultyBackend for what fails.
    """
    scratch = _aligned(max((instance.bytes.scratch for instance in instances), default=0), device.torch)
    for instance in instances:
        spec, failing = instance.spec, instance.spec.phases
        try:
            instance.backend_class.prepare(spec, report)
            instance.start(scratch)
            for phase in sorted(spec.phases):
                failing = frozenset({phase})
                _probe(instance, "decode" if phase == "decode" else "extend")
            device.synchronize()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise FaultyBackend(instance.candidate, error, spec.group, failing) from error


def _aligned(num_bytes: int, device: torch.device | str) -> Tensor:
    """Zeroed memory uint8 [num_bytes] at a multiple of 256; torch promises less on some devices."""
    memory = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + num_bytes]


def _probe(instance: Instance, phase: Phase) -> None:
    """Runs one layer of a made-up batch, on a cache of a few pages if there is one, and asks for finite numbers."""
    spec, backend = instance.spec, instance.backend
    assert backend is not None, "probed before it was started"
    prefix, queries = 5 if instance.layout else 0, 1 if phase == "decode" else 3
    keys = min(prefix + queries, spec.max_context)
    queries = min(queries, keys)
    view = table = None
    if instance.layout:
        width = -(-keys // spec.page_size)
        view = KVPool(spec, instance.layout, 1, width + 1).views[0]
        table = torch.arange(1, width + 1, dtype=torch.int32, device=spec.device)[None]
    batch = ForwardBatch.from_lengths([queries], [keys], table, spec.page_size, phase=phase, device=spec.device)
    heads = torch.randn(
        queries, spec.num_heads + 2 * spec.num_kv_heads, max(spec.head_dim, spec.v_head_dim),
        generator=torch.Generator().manual_seed(0),
    ).to(spec.device, torch_dtype(spec.dtype))  # fmt: skip
    q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    values = None if spec.attention == "mla" else v[..., : spec.v_head_dim]
    out = torch.full_like(q[..., : spec.v_head_dim], float("nan")).contiguous()
    lse = torch.full(out.shape[:2], float("nan"), device=spec.device) if spec.lse else None
    layer = AttentionLayer(
        index=0,
        kv=view,
        sinks=torch.zeros(spec.num_heads, device=spec.device) if spec.sinks else None,
        alibi_slopes=torch.zeros(spec.num_heads, device=spec.device) if spec.alibi else None,
    )
    backend.init_forward_metadata(batch)
    backend.init_forward_metadata_in_graph(batch)
    backend.forward(q[..., : spec.head_dim], k[..., : spec.head_dim], values, layer, batch, out=out, lse=lse)
    if not all(bool(torch.isfinite(x).all()) for x in (out, lse) if x is not None):
        raise ArithmeticError(f"a tiny {phase} batch left numbers that are not finite")
