"""headstock: attention backends as plugins, chosen from what they declare, driven through one lifecycle.

The public API. Importing it imports no torch; names that need torch are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headstock.negotiate import negotiate  # at once: its module has the same name, and would stand in for it

if TYPE_CHECKING:
    from headstock.backend import AttentionBackend, BackendSpec, GraphFallback, Progress, Workspace, WorkspaceBytes
    from headstock.batch import ForwardBatch
    from headstock.capabilities import Capabilities
    from headstock.engine.async_engine import AsyncEngine
    from headstock.engine.engine import Engine
    from headstock.errors import HeadstockError
    from headstock.hookspecs import hookimpl
    from headstock.ints import ANY, MultipleOf
    from headstock.kv.layout import KVLayout, KVView, LatentView, PagedView
    from headstock.layer import AttentionLayer
    from headstock.offer import Offer
    from headstock.plugins import discover
    from headstock.policy import Policy
    from headstock.runner.runner import ModelRunner

__version__ = "0.1.0"

_HOMES = {
    "ANY": "ints",
    "AsyncEngine": "engine.async_engine",
    "AttentionBackend": "backend",
    "AttentionLayer": "layer",
    "BackendSpec": "backend",
    "Capabilities": "capabilities",
    "Engine": "engine.engine",
    "ForwardBatch": "batch",
    "GraphFallback": "backend",
    "HeadstockError": "errors",
    "KVLayout": "kv.layout",
    "KVView": "kv.layout",
    "LatentView": "kv.layout",
    "ModelRunner": "runner.runner",
    "MultipleOf": "ints",
    "Offer": "offer",
    "PagedView": "kv.layout",
    "Policy": "policy",
    "Progress": "backend",
    "Workspace": "backend",
    "WorkspaceBytes": "backend",
    "discover": "plugins",
    "hookimpl": "hookspecs",
}

__all__ = [
    "ANY", "AsyncEngine", "AttentionBackend", "AttentionLayer", "BackendSpec", "Capabilities", "Engine", "ForwardBatch",
    "GraphFallback", "HeadstockError", "KVLayout", "KVView", "LatentView", "ModelRunner", "MultipleOf", "Offer",
    "PagedView", "Policy", "Progress", "Workspace", "WorkspaceBytes", "discover", "hookimpl", "negotiate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headstock' has no attribute {name!r}")
    value = getattr(import_module(f"headstock.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
