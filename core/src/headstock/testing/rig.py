"""A backend in the test stand: started in a workspace that shows an overrun, driven as the host drives it."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from headstock.backend import AttentionBackend, BackendSpec, Workspace, WorkspaceBytes
from headstock.batch import ForwardBatch
from headstock.layer import AttentionLayer
from headstock.testing.problem import POISON, Problem, Result

GUARD = 256
"""Bytes behind each workspace that nobody may touch."""


class Trespass(AssertionError):
    """A backend changed what it may only read, or wrote where it may not."""


class Rig:
    """One instance of `backend`, and what it is forbidden: its workspace's surroundings, and changing its inputs."""

    def __init__(self, backend: type[AttentionBackend], spec: BackendSpec):
        self.spec = spec
        sizes = WorkspaceBytes(*backend.workspace_bytes(spec))
        self._memory = [torch.full((n + GUARD,), POISON, dtype=torch.uint8, device=spec.device) for n in sizes]
        scratch, state = (memory[:n] for memory, n in zip(self._memory, sizes, strict=True))
        self.instance = backend(spec, Workspace(scratch, state.zero_()))
        self.scratch = scratch

    def run(self, problem: Problem) -> Result:
        """Plans and runs a problem on a copy of its cache."""
        batch, storage = problem.fresh()
        self.plan(batch)
        return self.forward(problem, batch, storage)

    def plan(self, batch: ForwardBatch) -> None:
        """Both planning hooks of an eager step."""
        before = _copies(batch)
        self.instance.init_forward_metadata(batch)
        self.instance.init_forward_metadata_in_graph(batch)
        _check_unchanged(batch, before, "planning changed the batch's")

    def forward(
        self, problem: Problem, batch: ForwardBatch, storage: Tensor | None, layer: AttentionLayer | None = None
    ) -> Result:
        """Runs one layer of a planned batch; the scratch is spoiled first, as another instance would leave it."""
        self.scratch.fill_(POISON)
        out, lse = outputs(problem)
        inputs = {"q": problem.q, "k": problem.k, "v": problem.v}
        before = _copies(batch) | {name: x.clone() for name, x in inputs.items() if x is not None}
        self.instance.forward(problem.q, problem.k, problem.v, layer or problem.layer(storage), batch, out=out, lse=lse)
        _check_unchanged(batch, before, "forward changed the batch's", inputs)
        for name, memory in zip(("scratch", "state"), self._memory, strict=True):
            if not bool((memory[-GUARD:] == POISON).all()):
                raise Trespass(f"it wrote past the end of its {name} workspace")
        return Result(out, lse, storage)


def outputs(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """out and lse, poisoned, as views of something wider: a backend must honour strides and write every element."""
    tokens, heads, dim, device = (
        problem.batch.num_tokens,
        problem.spec.num_heads,
        problem.spec.v_head_dim,
        problem.q.device,
    )
    out = torch.full((tokens, heads + 1, dim + 8), torch.nan, device=device).to(problem.q.dtype)[:, :heads, :dim]
    lse = torch.full((tokens, heads + 1), torch.nan, device=device)[:, :heads] if problem.spec.lse else None
    return out, lse


def _copies(batch: ForwardBatch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "metadata"}
    return {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}


def _check_unchanged(
    batch: ForwardBatch, before: dict[str, Tensor], what: str, inputs: dict[str, Tensor | None] | None = None
) -> None:
    for name, value in before.items():
        now = (inputs or {}).get(name, getattr(batch, name, None))
        if now is None or not torch.equal(now, value):
            raise Trespass(f"{what} {name}, which is read-only")
