"""The cases of the suite, made from what an offer declares: declare more, and more is tested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headstock.capabilities import ATTENTION_KINDS, PHASES
from headstock.offer import Offer
from headstock.requirement import Requirement
from headstock.testing.box import Box
from headstock.testing.problem import make_spec
from headstock.testing.rows import Fields
from headstock.testing.sizes import Level


@dataclass(frozen=True, slots=True)
class Case:
    """One law on one problem, `fields` as `make_problem` takes them. `cost` orders cases, smallest first.

    `other` is the backend that reads what this one wrote, if the case is about two.
    """

    name: str
    law: str
    fields: Mapping[str, Any] = field(hash=False)
    cost: int
    other: str = ""


def cases(offer: Offer, *, device: str = "cpu", capability: int | None = None, level: Level = "quick") -> list[Case]:
    """Every case for what `offer` declares and this device can run, smallest first; names are unique and stable."""
    found: dict[str, Case] = {}
    for box in boxes(offer, device, capability, level):
        for what, law, fields in box.cases():
            name = f"{box.phase}-{box.kind}-{law}-{what}"
            found.setdefault(name, Case(name, law, fields, _cost(law, fields)))
    for what, fields in relays(offer, offer, device, capability):
        name = f"both-{fields['attention']}-continues-{what}"
        found[name] = Case(name, "continues", fields, _cost("continues", fields))
    return sorted(found.values(), key=lambda case: (case.cost, case.name))


def boxes(offer: Offer, device: str, capability: int | None, level: Level) -> Iterator[Box]:
    """What can run here, by record, attention kind and phase."""
    for record in offer.capabilities:
        if device in record.devices and (capability is None or capability in record.compute_capability):
            for kind in (kind for kind in ATTENTION_KINDS if kind in record.attention):
                for phase in (phase for phase in PHASES if phase in record.phases):
                    yield Box(record, kind, phase, device, level)


def relays(writer: Offer, reader: Offer, device: str, capability: int | None) -> Iterator[tuple[str, Fields]]:
    """Prompts that one offer's extend begins and another's decode goes on with, where both cover them."""
    seen = set()
    for box in boxes(writer, device, capability, "quick"):
        if box.cached and box.phase == "extend" and box.kind not in seen:
            seen.add(box.kind)
            for fields in box.chunked():
                need = Requirement.of(make_spec({**fields, "phase": "decode"}, (1,)), "decode")
                if any(not need.unmet(record) for record in reader.capabilities):
                    yield f"prompt-{fields['query_lens'][0]}", {**fields, "host_lengths": "exact", "reader": "decode"}


def _cost(law: str, fields: Fields) -> int:
    """Roughly the products that the reference works out, in all runs of the law."""
    runs = {"graph": 24, "offsets": 40, "reuse": 3, "chunks": 3, "continues": 4, "absorbs": 2}.get(law, 1)
    runs += 4 * int(fields.get("replays", 0))
    pairs = sum(n * length for n, length in zip(fields["query_lens"], fields["seq_lens"], strict=True))
    return int(runs * (pairs + 1) * int(fields["num_heads"]) * (int(fields["head_dim"]) + 16))
