"""A backend in the test stand: started in a workspace that shows an overrun, driven as the host drives it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, NamedTuple

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
        surroundings = _surroundings()
        self.instance.forward(
            problem.q, problem.k, problem.v, layer or problem.layer(storage), batch, out=out.view, lse=lse and lse.view
        )
        _check_unchanged(batch, before, "forward changed the batch's", inputs)
        for name, memory in zip(("scratch", "state"), self._memory, strict=True):
            if not bool((memory[-GUARD:] == POISON).all()):
                raise Trespass(f"it wrote past the end of its {name} workspace")
        for name, output in (("out", out), ("lse", lse)):
            if output is not None and not output.kept_within():
                raise Trespass(f"it wrote to {name} outside the rows and columns that it was given")
        for name, value in _surroundings().items():
            if value != surroundings[name]:
                raise Trespass(f"it changed the process's {name}")
        return Result(out.view, lse and lse.view, storage)

    def raises(self, problem: Problem) -> None:
        """A planned forward that fails halfway, in the cache that it is given."""
        batch, _ = problem.fresh()
        self.plan(batch)
        out, lse = outputs(problem)
        layer = replace(problem.layer(None), kv=_BrokenView())  # type: ignore[arg-type]
        with suppress(BrokenCache):
            self.instance.forward(problem.q, problem.k, problem.v, layer, batch, out=out.view, lse=lse and lse.view)


class BrokenCache(Exception):
    """What a cache raises that is there to fail."""


class _BrokenView:
    def __getattr__(self, name: str) -> Any:
        raise BrokenCache(name)


class Output(NamedTuple):
    """A tensor to be written, poisoned, as a part of something larger: strides matter, and so does every element."""

    whole: Tensor
    view: Tensor

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Output:
        """One more row before and after, one more head, and 8 more columns where there are columns."""
        tokens, heads, *dim = shape
        whole = torch.full((tokens + 2, heads + 1, *(n + 8 for n in dim)), torch.nan, device=device).to(dtype)
        return cls(whole, whole[1:-1, :heads, : dim[0]] if dim else whole[1:-1, :heads])

    def kept_within(self) -> bool:
        """Whether all around the part is as it was."""
        around = self.whole.clone()
        around[tuple(slice(0 if i else 1, n + (0 if i else 1)) for i, n in enumerate(self.view.shape))] = torch.nan
        return bool(around.isnan().all())


def outputs(problem: Problem) -> tuple[Output, Output | None]:
    """out [T, Hq, Dv] and, where the spec wants it, lse [T, Hq]."""
    heads, device = (problem.batch.num_tokens, problem.spec.num_heads), problem.q.device
    lse = Output.of(heads, torch.float32, device) if problem.spec.lse else None
    return Output.of((*heads, problem.spec.v_head_dim), problem.q.dtype, device), lse


def _surroundings() -> dict[str, Any]:
    """What all code of a process shares, and no kernel has any business with."""
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "number of threads": torch.get_num_threads(),
        "random numbers": torch.get_rng_state().numpy().tobytes(),
    }


def _copies(batch: ForwardBatch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "metadata"}
    return {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}


def _check_unchanged(
    batch: ForwardBatch, before: dict[str, Tensor], what: str, inputs: dict[str, Tensor | None] | None = None
) -> None:
    for name, value in before.items():
        now = (inputs or {}).get(name, getattr(batch, name, None))
        if now is None or not torch.equal(now, value):
            if now is not None:
                now.copy_(value)  # other cases share it
            raise Trespass(f"{what} {name}, which is read-only")
