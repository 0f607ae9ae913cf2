"""Errors a person can act on: what failed, what was given, what would work, what to type."""

from __future__ import annotations


class HeadstockError(Exception):
    """A refusal with its cure.

    `str()` is one line unless a part holds line breaks of its own. Every part but `what` may be left out
    when it has nothing to add; the command line prints the line and exits with `exit_code`.
    """

    exit_code = 2

    def __init__(self, what: str, *, given: object = None, works: str | None = None, type: str | None = None):
        self.what, self.given, self.works, self.type = what, given, works, type
        parts = [what]
        if given is not None:
            parts.append(f"given: {given}")
        if works:
            parts.append(f"would work: {works}")
        if type:
            parts.append(f"type: {type}")
        super().__init__("; ".join(parts))


class PluginError(HeadstockError):
    """A plugin that cannot be used: it failed to import, declares something invalid, or lacks a package."""


class StepError(HeadstockError):
    """A backend that failed in a step, once everything had been accepted: a failure, and no refusal."""

    exit_code = 1


class NegotiationError(HeadstockError):
    """No backend, or no combination of backends, covers what the model needs; `decision` holds every refusal."""

    def __init__(self, what: str, *, decision: object = None, **parts: object):
        super().__init__(what, **parts)  # type: ignore[arg-type]
        self.decision = decision


class ModelError(HeadstockError):
    """A model folder or file that cannot be read, is damaged, or describes an architecture that is not supported."""


class RequestError(HeadstockError):
    """A prompt or a sampling value that cannot be served; other requests are not affected."""


class OutOfPages(HeadstockError):
    """The KV cache has fewer free pages than were asked for; nothing was allocated."""


class PageError(HeadstockError):
    """A page freed twice, or one this allocator never handed out."""


class MemoryPlanError(HeadstockError):
    """The model, its workspaces and the smallest useful KV cache do not fit into the memory given."""
