"""`headstock plugins`: what is installed, what each brings, what is broken and the cure."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

import typer

from headstock import hookspecs
from headstock.cli.options import JSON
from headstock.cli.tables import document, faults, note, table
from headstock.errors import HeadstockError
from headstock.plugins import Plugin, installed, none_loaded

Hooks = Annotated[
    list[str] | None, typer.Option("--hook", metavar="NAME", help="only plugins with this hook, or with any of several")
]
COLUMNS = ("plugin", "status", "distribution", "backends", "hooks")


def plugins(hook: Hooks = None, json: JSON = False) -> None:
    """Lists the installed plugins, with the fault and the cure of those that are broken."""
    wanted = [_known(name) for name in hook or ()]
    found = [plugin for plugin in installed() if not wanted or set(wanted) & set(plugin.hooks)]
    if json:
        document(plugins=[_as_json(plugin) for plugin in found])
        return
    if not found:
        note(f"no plugin implements {' or '.join(wanted)}" if wanted else none_loaded())
        return
    table(COLUMNS, [_row(plugin) for plugin in found])
    faults((plugin.name, plugin.fault) for plugin in found)


def _known(hook: str) -> str:
    """A hook's name, if there is one; the specifications are the functions of `hookspecs` that pluggy marked."""
    known = [name for name, value in vars(hookspecs).items() if hasattr(value, "headstock_spec")]
    if hook not in known:
        near = get_close_matches(hook, known, 1)
        raise HeadstockError("unknown hook", given=hook, works=f"{near[0]}, perhaps" if near else ", ".join(known))
    return hook


def _status(plugin: Plugin) -> str:
    return "broken" if plugin.fault else "ok"


def _row(plugin: Plugin) -> list[str]:
    backends = ", ".join(offer.name for offer in plugin.offers)
    return [plugin.name, _status(plugin), f"{plugin.distribution} {plugin.version}", backends, ", ".join(plugin.hooks)]


def _as_json(plugin: Plugin) -> dict[str, object]:
    return {
        "name": plugin.name,
        "status": _status(plugin),
        "distribution": plugin.distribution,
        "distribution_version": plugin.version,
        "module": plugin.module,
        "backends": [offer.name for offer in plugin.offers],
        "hooks": list(plugin.hooks),
        "fault": plugin.fault.model_dump() if plugin.fault else None,
    }
