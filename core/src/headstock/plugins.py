"""Discovery: one entry point at a time, isolated and lazy, with a fault and its cure for whatever is broken.

The entry-point group is `headstock`; the key is the plugin's name, the value a light module with `@hookimpl`s.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import ModuleType
from typing import Any, TypeVar

import pluggy
import pydantic

from headstock import hookspecs
from headstock.errors import HeadstockError
from headstock.offer import API_VERSION, Candidate, Fault, Offer, canonical, describe_validation_error
from headstock.prints import stdout_to_stderr
from headstock.requires import missing_packages

GROUP = "headstock"
ALLOW_LIST = "HEADSTOCK_PLUGINS"
HANG_SECONDS = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One installed entry point: where it came from, what it offers and implements, and what is wrong with it."""

    name: str
    distribution: str
    version: str
    module: str
    offers: tuple[Offer, ...] = ()
    hooks: tuple[str, ...] = ()
    fault: Fault | None = None
    implementation: ModuleType | None = field(default=None, repr=False, compare=False)

    def candidates(self) -> list[Candidate]:
        """What this plugin puts forward; a plugin that did not load stands in under its own name, with its fault."""
        return [
            Discovered(
                plugin=self,
                name=offer.name if offer else canonical(self.name),
                offer=offer,
                fault=self.fault,
                distribution=self.distribution,
                version=self.version,
            )
            for offer in self.offers or ([None] if self.fault else [])
        ]


class Discovered(Candidate):
    """A candidate that knows its `Plugin`, whose observers are called wherever the candidate is offered."""

    plugin: Any = pydantic.Field(exclude=True, repr=False)


def discover(allow: Iterable[str] | None = None) -> list[Candidate]:
    """The backends of every installed plugin, broken ones with their faults, sorted by name.

    `allow` names the only plugins to load ("-name" leaves one out instead); by default the comma-separated environment
    variable HEADSTOCK_PLUGINS, where it is set. Never raises for a plugin's sake.
    """
    return [candidate for plugin in installed(allow) for candidate in plugin.candidates()]


def installed(allow: Iterable[str] | None = None) -> list[Plugin]:
    """Every installed plugin, loaded in isolation, sorted by name and distribution."""
    points = sorted(entry_points(), key=lambda point: (canonical(point.name), _source(point)))
    wanted = _allowed(points, allow)
    versions: dict[str, str | None] = {}
    plugins = []
    for point in points:
        if wanted(point.name):
            namesakes = [other for other in points if canonical(other.name) == canonical(point.name)]
            plugins.append(_load(point, namesakes, versions))
    return _refuse_twins(plugins)


def entry_points() -> list[metadata.EntryPoint]:
    """What is installed under the group, the first on the path of each distribution; nothing is imported.

    Damaged metadata, of whatever distribution, costs only the one it belongs to, and a warning.
    """
    try:
        return list(metadata.entry_points(group=GROUP))
    except Exception:  # one unreadable entry_points.txt hides all
        found: dict[str, metadata.EntryPoints] = {}
        for distribution in metadata.distributions():
            name = distribution.metadata["Name"] or "?"
            try:
                found.setdefault(canonical(name), distribution.entry_points.select(group=GROUP))
            except Exception as error:
                cure = f"pip install --force-reinstall {name}"
                warnings.warn(f"the entry points of {name} are damaged ({error}); {cure}", stacklevel=4)
        return [point for points in found.values() for point in points]


def none_loaded() -> str:
    """Why no plugin is loaded, and what to do: none is installed, or the environment leaves all of them out."""
    if names := sorted({point.name for point in entry_points()}):
        given = f"{ALLOW_LIST}={os.environ.get(ALLOW_LIST, '')}"
        return f"{given} leaves out every installed plugin: {', '.join(names)}; type: unset {ALLOW_LIST}"
    return "no plugin is installed; the extras of headstock install some: pip install 'headstock[EXTRA]'"


def _allowed(points: list[metadata.EntryPoint], allow: Iterable[str] | None) -> Callable[[str], bool]:
    """The allow-list as a test by name; unknown names warn with the nearest known one."""
    if allow is None:
        if ALLOW_LIST not in os.environ:
            return lambda name: True
        allow = os.environ[ALLOW_LIST].split(",")
    given = [name.strip() for name in allow]
    names = {canonical(name) for name in given if name and not name.startswith("-")}
    denied = {canonical(name[1:]) for name in given if name.startswith("-")}
    known = {canonical(point.name) for point in points}
    for name in sorted((names | denied) - known):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"installed: {', '.join(sorted(known)) or 'none'}"
        warnings.warn(f"{ALLOW_LIST} names no installed plugin: {name!r}; {hint}", stacklevel=3)
    if denied and not names:
        return lambda name: canonical(name) not in denied
    return lambda name: canonical(name) in names - denied


def _load(point: metadata.EntryPoint, namesakes: list[metadata.EntryPoint], versions: dict[str, str | None]) -> Plugin:
    distribution = _source(point)
    plugin: dict[str, Any] = {
        "name": point.name,
        "distribution": distribution,
        "version": (point.dist.version if point.dist else "") or "",
        "module": point.value,
    }
    if len(namesakes) > 1:
        what = f"the plugin name {point.name!r} is taken twice, by {_both(map(_source, namesakes))}"
        return Plugin(**plugin, fault=Fault(what=what, cure=f"pip uninstall {distribution}, or the other"))
    missing = missing_packages((point.dist.requires if point.dist else None) or [], versions)
    try:
        with stdout_to_stderr():
            module, hooks, offers = _in_time(lambda: _import(point))
    except KeyboardInterrupt:
        raise
    except Hanging as error:
        hung = Fault(what=str(error), cure=f"pip uninstall {distribution}, or leave it out: {ALLOW_LIST}=-{point.name}")
        print(f"headstock: goes on without the plugin {point.name!r} ({distribution}): {hung}", file=sys.stderr)
        return Plugin(**plugin, fault=hung)
    except BaseException as error:
        fault = describe_fault(error, _cure(error, point, distribution))
        if missing:  # the likelier cause, and one that can be mended
            fault = missing.model_copy(update={"detail": fault.detail})
        return Plugin(**plugin, fault=fault)
    plugin |= {"offers": offers, "hooks": tuple(sorted(hooks)), "implementation": module}
    return Plugin(**plugin, fault=_version_fault(offers) or missing)


def _cure(error: BaseException, point: metadata.EntryPoint, distribution: str) -> str:
    """What may mend a plugin that did not load, of which all that its distribution requires is there."""
    module = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if module and module.partition(".")[0] != point.module.partition(".")[0]:
        return f"install what brings {module!r}, which it does not require by name, or pip uninstall {distribution}"
    return f"reinstall or remove it: pip uninstall {distribution}"


def _import(point: metadata.EntryPoint) -> tuple[ModuleType, dict[str, Any], tuple[Offer, ...]]:
    module = importlib.import_module(point.module)
    hooks = _hooks(module, point.name)
    return module, hooks, _offers(module) if "attention_backends" in hooks else ()


class BadPlugin(Exception):
    """What is wrong with a plugin's module, and the cure."""


class Hanging(Exception):
    """Something that was not done within HANG_SECONDS."""


def _in_time(load: Callable[[], T]) -> T:
    """What `load` returns or raises; raises Hanging once it has taken HANG_SECONDS, and leaves it behind.

    It runs in a thread of its own, which costs less than a millisecond. An alarm signal would cost less yet, but only
    works in the main thread, cannot end a wait inside C code, takes a handler that may be the application's, and stops
    imports half-way that others go on to need: half a torch is worse than none. What never lets go of the interpreter
    lock stops every thread of a process; `doctor` looks from another one.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(load())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    if raised:
        raise raised[0]
    if not returned:
        raise Hanging(f"it has not finished loading after {HANG_SECONDS:g} s")
    return returned[0]


def _hooks(module: ModuleType, name: str) -> dict[str, Any]:
    """The hooks a module implements, checked by pluggy against their specification and against misspelling."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    known = [spec for spec in dir(hookspecs) if manager.parse_hookspec_opts(hookspecs, spec) is not None]
    marked = [attr for attr in dir(module) if manager.parse_hookimpl_opts(module, attr) is not None]
    for attr in marked:
        if attr not in known:
            near = difflib.get_close_matches(attr, known, 1) or known
            raise BadPlugin(f"{attr!r} is no hook of headstock's API version {API_VERSION}; did you mean {near[0]!r}?")
    try:
        manager.register(module, name)
    except pluggy.PluginValidationError as error:
        message = " ".join(str(error).split())
        raise BadPlugin(
            f"a hook asks for what headstock's API version {API_VERSION} does not pass: {message}"
        ) from None
    if not marked:
        raise BadPlugin(f"{module.__name__} implements no hook; known: {', '.join(known)}")
    return {attr: getattr(module, attr) for attr in marked}


def _offers(module: ModuleType) -> tuple[Offer, ...]:
    offers = module.attention_backends()
    if not isinstance(offers, list | tuple) or not all(isinstance(offer, Offer) for offer in offers):
        raise BadPlugin(f"attention_backends() must return a list of Offer, it returned {offers!r}"[:300])
    return tuple(offers)


def _version_fault(offers: Iterable[Offer]) -> Fault | None:
    for offer in offers:
        if offer.api_version != API_VERSION:
            newer = offer.api_version > API_VERSION
            return Fault(
                what=f"{offer.name} needs API version {offer.api_version}, this headstock speaks {API_VERSION}",
                cure="pip install -U headstock" if newer else "install a newer release of the plugin",
            )
    return None


def _refuse_twins(plugins: list[Plugin]) -> list[Plugin]:
    """Gives a fault to plugins that offer a backend of one name: choosing either would be a guess."""
    owners: dict[str, list[str]] = {}
    for plugin in plugins:
        for offer in plugin.offers:
            owners.setdefault(offer.name, []).append(plugin.distribution or plugin.name)
    result = []
    for plugin in plugins:
        twins = [offer.name for offer in plugin.offers if len(owners[offer.name]) > 1]
        if twins and plugin.fault is None:
            what = f"the backend {twins[0]!r} is offered twice, by {_both(owners[twins[0]])}"
            plugin = replace(plugin, fault=Fault(what=what, cure=f"pip uninstall {plugin.distribution}, or the other"))
        result.append(plugin)
    return result


def _both(distributions: Iterable[str]) -> str:
    return " and ".join(sorted(set(distributions)))


def describe_fault(error: BaseException, cure: str = "") -> Fault:
    """Any failure of a plugin's code as a fault: one line, the cure, and the traceback as its detail."""
    detail = "".join(traceback.format_exception(error))
    if isinstance(error, pydantic.ValidationError):
        return Fault(what=describe_validation_error(error), cure=cure, detail=detail)
    if isinstance(error, BadPlugin | HeadstockError):
        return Fault(what=str(error), cure=cure, detail=detail)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return Fault(what=f"it imports {error.name!r}, which is not installed", cure=cure, detail=detail)
    first_line = (str(error).strip().splitlines() or [""])[0]
    return Fault(what=f"{type(error).__name__}: {first_line}".rstrip(": "), cure=cure, detail=detail)


def _source(point: metadata.EntryPoint) -> str:
    return (point.dist.name if point.dist else "") or ""


class Observers:
    """The healthy plugins' hooks that watch a run. One that raises is told of, once, and not called again."""

    def __init__(self, plugins: Iterable[Plugin], tell: Callable[[str], None]):
        self._tell = tell
        self._watching: dict[str, list[tuple[Plugin, pluggy.PluginManager]]] = {}
        for plugin in plugins:
            if plugin.implementation is not None and plugin.fault is None:
                manager = pluggy.PluginManager(GROUP)
                manager.add_hookspecs(hookspecs)
                manager.register(plugin.implementation, plugin.name)
                for hook in plugin.hooks:
                    self._watching.setdefault(hook, []).append((plugin, manager))

    def notify(self, hook: str, **arguments: Any) -> None:
        """Calls `hook` of every plugin that implements it."""
        for plugin, manager in tuple(self._watching.get(hook, ())):
            try:
                getattr(manager.hook, hook)(**arguments)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if (plugin, manager) not in self._watching[hook]:  # it was called again meanwhile, and raised there
                    continue
                for each in plugin.hooks:
                    self._watching[each].remove((plugin, manager))
                source = f"{plugin.name} ({plugin.distribution} {plugin.version})"
                self._tell(f"{hook} of the plugin {source} failed and is left out: {describe_fault(error).what}")
