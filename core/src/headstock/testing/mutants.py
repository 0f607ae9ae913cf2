"""Planted faults: specimens with one thing wrong each, of the kinds that users of attention backends have reported.

Each class says in its first line what is wrong, and overrides as little as that takes. The suite must catch every one.
They are in the modules below, by what is wrong.
"""

from __future__ import annotations

from headstock.testing import (
    cache_mutants,
    graph_mutants,
    latent_mutants,
    level_mutants,
    mask_mutants,
    math_mutants,
    place_mutants,
    plan_mutants,
    prefix_mutants,
)
from headstock.testing.specimen import Specimen

MODULES = (
    mask_mutants, place_mutants, math_mutants, cache_mutants, prefix_mutants, plan_mutants, graph_mutants,
    level_mutants, latent_mutants,
)  # fmt: skip


def mutants() -> list[type[Specimen]]:
    """Every planted fault, module by module in this order, and in each in the order of its page."""
    found = [(module.__name__, kind) for module in MODULES for kind in vars(module).values() if isinstance(kind, type)]
    return [kind for name, kind in found if Specimen in kind.__mro__[1:] and kind.__module__ == name]
