"""The hooks a plugin may implement. Hooks gain arguments and never lose them; an implementation may take fewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from headstock.batch import ForwardBatch
    from headstock.decision import Decision
    from headstock.offer import Offer
    from headstock.runner.captured import CaptureReport

hookspec = pluggy.HookspecMarker("headstock")
hookimpl = pluggy.HookimplMarker("headstock")
"""Marks a function of a plugin's module as the implementation of the hook of its name."""


@hookspec
def attention_backends() -> list[Offer]:  # type: ignore[empty-body]
    """The backends this plugin offers. Called at every listing: import neither torch nor a kernel library here."""


@hookspec
def doctor_facts() -> Mapping[str, str]:  # type: ignore[empty-body]
    """What `doctor` tells of this plugin here, by what it is: versions, compiled kernels, what is switched off and why.

    Called in a process of its own, with no model: import what it takes.
    """


@hookspec
def on_decision(decision: Decision) -> None:
    """Called once the backends are chosen and have passed their probes, before weights are loaded."""


@hookspec
def before_forward(batch: ForwardBatch) -> None:
    """Called before each step is planned, or replayed, once per layer group and segment; never per layer."""


@hookspec
def after_forward(batch: ForwardBatch) -> None:
    """Called after each step was issued, once per layer group and segment; device work may still be running."""


@hookspec
def on_capture(report: Sequence[CaptureReport]) -> None:
    """Called after the decode graphs are captured, with what each size cost and why one has no graph."""
