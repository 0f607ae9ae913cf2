"""`headstock backends`: the capability matrix, generated from the axes and from what plugins declare."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any

import typer

from headstock.capabilities import AXES, Capabilities
from headstock.cli.options import JSON
from headstock.cli.tables import document, faults, note, paragraphs, table
from headstock.errors import HeadstockError
from headstock.offer import Candidate, Offer
from headstock.plugins import discover, none_loaded
from headstock.refusals import words

AxisNames = Annotated[list[str] | None, typer.Option("--axis", metavar="NAME", help="only this axis; may be repeated")]


def backends(axis: AxisNames = None, json: JSON = False) -> None:
    """Shows what every installed backend can do, record by record: a record must cover all that a model asks."""
    axes = [_known(name) for name in axis or AXES]
    candidates = discover()
    offers = [(candidate, candidate.offer) for candidate in candidates if candidate.offer is not None]
    if json:
        listed = [_as_json(candidate, axes) for candidate in candidates]
        document(axes={name: {"kind": AXES[name].kind, "doc": AXES[name].doc} for name in axes}, backends=listed)
        return
    if axis:
        records = [(offer.name, record) for _, offer in offers for record in offer.capabilities]
        rows = [[name, str(record), *_cells(record, axes)] for name, record in records]
        table(["backend", "record", *axes], rows)
        print()
        paragraphs(f"{name}: {AXES[name].doc}" for name in axes)
    else:
        for number, (candidate, offer) in enumerate(offers):
            print(end="\n" if number else "")
            _matrix(candidate, offer, axes)
    if not candidates:
        note(none_loaded())
    faults((candidate.name, candidate.fault) for candidate in candidates)


def _matrix(candidate: Candidate, offer: Offer, axes: list[str]) -> None:
    """One backend: axes downward, records across; what every record leaves at its default fits one line."""
    aliases = f", also called {', '.join(offer.aliases)}" if offer.aliases else ""
    defaults = {name: Capabilities.model_fields[name].default for name in axes}
    declared = [name for name in axes if any(getattr(each, name) != defaults[name] for each in offer.capabilities)]
    columns = [_cells(record, declared) for record in offer.capabilities]
    rows = [[name, *cells] for name, *cells in zip(declared, *columns, strict=True)]
    table(["axis", *map(str, offer.capabilities)], rows, title=f"{offer.name} ({candidate.source}){aliases}")
    paragraphs(["by default: " + ", ".join(f"{name} {_cell(defaults[name])}" for name in axes if name not in declared)])


def _cells(record: Capabilities, axes: list[str]) -> list[str]:
    return [_cell(getattr(record, name)) for name in axes]


def _cell(offered: Any) -> str:
    if offered is None or offered == frozenset():
        return "–"
    return words(offered).strip("{}")


def _known(axis: str) -> str:
    name = axis.replace("-", "_")
    if name not in AXES:
        near = get_close_matches(name, AXES, 1)
        raise HeadstockError("unknown axis", given=axis, works=f"{near[0]}, perhaps" if near else ", ".join(AXES))
    return name


def _as_json(candidate: Candidate, axes: list[str]) -> dict[str, Any]:
    offer, fault = candidate.offer, candidate.fault
    records = [
        {"label": str(record), "preference": record.preference, **record.model_dump(mode="json", include=set(axes))}
        for record in (offer.capabilities if offer else ())
    ]
    return {
        "name": candidate.name,
        "distribution": candidate.distribution,
        "distribution_version": candidate.version,
        "aliases": list(offer.aliases) if offer else [],
        "api_version": offer.api_version if offer else None,
        "fault": {"what": fault.what, "cure": fault.cure} if fault else None,
        "records": records,
    }
