"""Loading what negotiation chose: the backend's class, its options and layouts, checked before any weight is read."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pydantic

from headstock.backend import AttentionBackend
from headstock.errors import PluginError
from headstock.offer import Candidate, Offer, describe_validation_error, own_names
from headstock.plugins import describe_fault
from headstock.prints import stdout_to_stderr

if TYPE_CHECKING:
    from headstock.kv.layout import KVLayout

HOOK_PREFIXES = ("forward", "init_", "workspace")


def load_backend(candidate: Candidate) -> type[AttentionBackend]:
    """The class behind a candidate's offer.

    Raises PluginError, with the cause as its `__cause__`, when it cannot be imported, is no AttentionBackend, leaves a
    method unwritten, has a public method that looks like a hook and is none, or takes other extra inputs than its
    capabilities declare.
    """
    offer = candidate.offer
    assert offer is not None, "a candidate without an offer has no class"
    backend = resolve(offer.backend, f"the backend {offer.name} ({candidate.source})")
    problem = _problem(backend, offer)
    if problem:
        where = f"{backend.__module__}.{backend.__qualname__}" if isinstance(backend, type) else repr(backend)
        raise PluginError(
            f"the backend {offer.name} ({candidate.source}) does not keep the contract: {problem}", given=where
        )
    checked: type[AttentionBackend] = backend
    return checked


def load_layout(name: str, candidates: Iterable[Candidate]) -> type[KVLayout]:
    """The KV layout called `name`: built in, or brought by a candidate."""
    from headstock.kv.layout import BUILTIN_LAYOUTS, KVLayout

    if name in BUILTIN_LAYOUTS:
        return BUILTIN_LAYOUTS[name]
    brought = {
        candidate.offer.kv_layouts[name]: candidate.source
        for candidate in candidates
        if candidate.offer is not None and name in candidate.offer.kv_layouts
    }
    if not brought:
        raise PluginError(f"no plugin brings the KV layout {name!r}", works=", ".join(BUILTIN_LAYOUTS))
    if len(brought) > 1:
        raise PluginError(f"two plugins bring a KV layout {name!r}", given=" and ".join(brought.values()))
    [(target, source)] = brought.items()
    layout = resolve(target, f"the KV layout {name} of {source}")
    if not (isinstance(layout, type) and issubclass(layout, KVLayout)):
        raise PluginError(f"the KV layout {name} of {source} is no KVLayout", given=repr(layout))
    if missing := sorted(layout.__abstractmethods__):
        raise PluginError(f"the KV layout {name} of {source} leaves {', '.join(missing)} unwritten")
    checked: type[KVLayout] = layout
    return checked


def load_options(offer: Offer, given: Mapping[str, Any]) -> Any:
    """A backend's own options, validated by the pydantic model that it names; None where it has none."""
    if offer.options is None:
        if given:
            raise PluginError(f"the backend {offer.name} has no options", given=", ".join(given))
        return None
    model = resolve(offer.options, f"the options of {offer.name}")
    if not (isinstance(model, type) and issubclass(model, pydantic.BaseModel)):
        raise PluginError(f"the options of {offer.name} are no pydantic model", given=repr(model))
    for key in given:
        if key not in model.model_fields:
            near = difflib.get_close_matches(key, model.model_fields, 1)
            works = f"{near[0]}, perhaps" if near else ", ".join(model.model_fields)
            raise PluginError(f"the backend {offer.name} has no option {key!r}", works=works)
    try:
        return model.model_validate(dict(given))
    except pydantic.ValidationError as error:
        raise PluginError(f"options of {offer.name}: {describe_validation_error(error)}") from None


def own_options(
    given: Mapping[str, Mapping[str, Any]], candidates: Sequence[Candidate]
) -> dict[str, Mapping[str, Any]]:
    """Options by the names of their backends; refused is what no backend is called, has or accepts.

    Those of a backend that is broken are let pass where the model of its options is broken too.
    """
    own = own_names(given, candidates)
    for each in candidates:
        if each.offer is None or each.name not in own:
            continue
        try:
            load_options(each.offer, own[each.name])
        except PluginError as error:
            if each.usable or error.__cause__ is None:  # else nothing can tell, and nothing will run
                raise
    return own


def resolve(target: Any, what: str) -> Any:
    """The object behind "package.module:Name", or `target` itself when it is one already; PluginError when it fails."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    try:
        with stdout_to_stderr():
            return getattr(import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(f"{what} does not load: {describe_fault(error).what}", given=target) from error


def _problem(backend: Any, offer: Offer) -> str:
    """Where a class departs from the contract, in words; empty if nowhere."""
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        return "it is no subclass of headstock.AttentionBackend"
    if missing := sorted(getattr(backend, "__abstractmethods__", ())):
        return f"it leaves {', '.join(missing)} unwritten"
    hooks = [name for name in vars(AttentionBackend) if not name.startswith("_")]
    own = {name for cls in backend.__mro__ if cls not in AttentionBackend.__mro__ for name in vars(cls)}
    for name in sorted(own):
        if name.startswith(HOOK_PREFIXES) and name not in hooks and inspect.isroutine(getattr(backend, name)):
            near = difflib.get_close_matches(name, hooks, 1, cutoff=0.3)
            return f"{name!r} is no hook; did you mean {near[0]!r}?" if near else f"{name!r} is no hook"
    for name in hooks:
        asked_of_the_class = isinstance(inspect.getattr_static(AttentionBackend, name), classmethod)
        if asked_of_the_class and not isinstance(inspect.getattr_static(backend, name), classmethod | staticmethod):
            return f"{name} is asked of the class, before there is an instance; put @classmethod above it"
    declared = frozenset().union(*(record.extra_inputs for record in offer.capabilities))
    signature = inspect.signature(backend.forward)
    kinds = {parameter.name: parameter.kind for parameter in signature.parameters.values()}
    taken = {name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY} - {"out", "lse"}
    if taken != declared:
        return f"forward takes the extra inputs {sorted(taken)}, its capabilities declare {sorted(declared)}"
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return "forward takes any keyword, so that a misspelt one would pass"
    try:
        signature.bind("self", "q", "k", "v", "layer", "batch", out="out", lse="lse", **{name: name for name in taken})
    except TypeError as error:
        return f"forward cannot be called with (q, k, v, layer, batch, *, out, lse): {error}"
    return ""
