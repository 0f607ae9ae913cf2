"""The backend instances of one runner: loaded from a decision, given their workspaces, probed with tiny batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstock.backend import AttentionBackend, BackendSpec, Phase, Report, Workspace, WorkspaceBytes
from headstock.batch import ForwardBatch
from headstock.decision import Decision
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
from headstock.runner.requirements import backend_spec, layer_groups

ALIGNMENT = 256


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

    def remains(self, phases: frozenset[str]) -> Candidate:
        """The candidate as it may still be chosen: for these phases alone; with its fault where there are none."""
        offer = self.candidate.offer
        assert offer is not None, "a backend that was chosen has an offer"
        if not phases:
            return self.candidate.failed(describe_fault(self.error, "headstock doctor"))
        records = tuple(each.model_copy(update={"phases": each.phases & phases}) for each in offer.capabilities)
        return self.candidate.model_copy(update={"offer": offer.model_copy(update={"capabilities": records})})


@dataclass(slots=True)
class Instance:
    """One backend for one layer group and attention kind: what it was specified as, and what it became."""

    candidate: Candidate
    spec: BackendSpec
    backend_class: type[AttentionBackend]
    layout: type[KVLayout]
    bytes: WorkspaceBytes
    bytes_per_page: int  # of one layer's cache
    backend: AttentionBackend | None = field(default=None)

    def start(self, scratch: Tensor) -> None:
        """Constructs the backend, with its own zeroed state beside the shared scratch."""
        self.backend = self.backend_class(self.spec, Workspace(scratch, _aligned(self.bytes.state, self.spec.device)))


class Limits(NamedTuple):
    """What an instance must be able to serve: rows and tokens of a forward, a token per row or more, plans, levels."""

    max_batch: int
    max_tokens: int
    max_plans: int = 1  # alive at once
    max_levels: int = 0  # of shared prefixes, for backends that read them once


def load_instances(
    decision: Decision,
    candidates: Iterable[Candidate],
    config: ModelConfig,
    device: Device,
    limits: Limits,
    options: Mapping[str, Mapping[str, Any]],
) -> dict[tuple[str, str], Instance]:
    """Instances by (group, role), one per (group, backend, attention kind). Raises FaultyBackend for what fails."""
    field = list(candidates)
    by_name = {candidate.name: candidate for candidate in field if candidate.usable}
    groups = layer_groups(config)
    instances: dict[tuple[str, str, str], Instance] = {}
    roles: dict[tuple[str, str], Instance] = {}
    for choice in decision.choices:
        for winner in choice.winners:
            key = (choice.group, winner.backend, choice.requirement.attention)
            if key not in instances:
                needs = [
                    each.requirement
                    for each in decision.choices
                    if (each.group, each.requirement.attention) == (key[0], key[2])
                    and any(other.backend == winner.backend for other in each.winners)
                ]
                candidate = by_name[winner.backend]
                own, phases = options.get(candidate.name, {}), frozenset(need.phase for need in needs)
                spec = backend_spec(
                    needs,
                    config.layers[groups[choice.group][0]],
                    device=str(device.torch),
                    num_sms=device.num_sms,
                    max_batch=limits.max_batch,
                    max_tokens=limits.max_tokens,
                    max_plans=limits.max_plans,
                    max_levels=limits.max_levels if _reads_once(candidate, needs) else 0,
                    options=_options(candidate, own, choice.group, phases),
                )
                instances[key] = _load(candidate, spec, field)
            roles[choice.group, choice.role] = instances[key]
    return roles


def _reads_once(candidate: Candidate, needs: Iterable[Requirement]) -> bool:
    """Whether a backend that decodes without a window declares cascade for all that it serves."""
    assert candidate.offer is not None, "a winner has an offer"
    records = candidate.offer.capabilities
    asked = [need.model_copy(update={"cascade": True}) for need in needs]
    return any(need.phase == "decode" and not need.sliding_window for need in asked) and all(
        any(not need.unmet(record) for record in records) for need in asked
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
        layout = load_layout(spec.kv_layout, candidates)
        wanted = WorkspaceBytes(*backend_class.workspace_bytes(spec))
        return Instance(candidate, spec, backend_class, layout, wanted, layout.bytes_per_page(spec))
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
    """Runs one layer of a made-up batch on a cache of a few pages and asks for finite numbers."""
    spec, backend = instance.spec, instance.backend
    assert backend is not None, "probed before it was started"
    prefix, queries = 5, 1 if phase == "decode" else 3
    keys = min(prefix + queries, spec.max_context)
    queries = min(queries, keys)
    width = -(-keys // spec.page_size)
    view = KVPool(spec, instance.layout, 1, width + 1).views[0]
    table = torch.arange(1, width + 1, dtype=torch.int32, device=spec.device)[None]
    batch = ForwardBatch.from_lengths([queries], [keys], table, spec.page_size, phase=phase)
    heads = torch.randn(
        queries, spec.num_heads + 2 * spec.num_kv_heads, max(spec.head_dim, spec.v_head_dim),
        generator=torch.Generator().manual_seed(0),
    ).to(spec.device, torch_dtype(spec.dtype))  # fmt: skip
    q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    out = torch.full_like(q[..., : spec.v_head_dim], float("nan")).contiguous()
    layer = AttentionLayer(
        index=0,
        kv=view,
        sinks=torch.zeros(spec.num_heads, device=spec.device) if spec.sinks else None,
        alibi_slopes=torch.zeros(spec.num_heads, device=spec.device) if spec.alibi else None,
    )
    backend.init_forward_metadata(batch)
    backend.init_forward_metadata_in_graph(batch)
    backend.forward(q[..., : spec.head_dim], k[..., : spec.head_dim], v[..., : spec.v_head_dim], layer, batch, out=out)
    if not bool(torch.isfinite(out).all()):
        raise ArithmeticError(f"a tiny {phase} batch left numbers that are not finite")
