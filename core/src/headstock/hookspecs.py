"""The hooks a plugin may implement. Hooks gain arguments and never lose them; an implementation may take fewer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from headstock.batch import ForwardBatch
    from headstock.decision import Decision
    from headstock.offer import Offer

hookspec = pluggy.HookspecMarker("headstock")
hookimpl = pluggy.HookimplMarker("headstock")
"""Marks a function of a plugin's module as the implementation of the hook of its name."""


@hookspec
def attention_backends() -> list[Offer]:  # type: ignore[empty-body]
    """The backends this plugin offers. Called at every listing: import neither torch nor a kernel library here."""


@hookspec
def on_decision(decision: Decision) -> None:
    """Called once the backends are chosen and have passed their probes, before weights are loaded."""


@hookspec
def before_forward(batch: ForwardBatch) -> None:
    """Called before each step's planning, once per layer group and segment; never per layer, never inside a graph."""


@hookspec
def after_forward(batch: ForwardBatch) -> None:
    """Called after each step was issued, once per layer group and segment; device work may still be running."""


@hookspec
def on_capture(report: Any) -> None:
    """Called after the graphs are captured, with what each bucket cost."""
