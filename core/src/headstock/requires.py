"""The packages a plugin's distribution requires, checked against what is installed; nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING

from headstock.offer import Fault

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet


def missing_packages(requires: Iterable[str], versions: dict[str, str | None]) -> Fault | None:
    """One fault for all requirements that are absent or at a wrong version, or None.

    `requires` holds the lines of a distribution's own metadata (PEP 508); extras are not asked for. `versions`
    remembers look-ups by distribution name, so that many plugins cost one look-up per package.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    wrong: dict[str, str] = {}
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            reason = str(error).partition("\n")[0]
            return Fault(what=f"its metadata is damaged, it requires {line!r}: {reason}", cure="reinstall the plugin")
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name
        if name not in versions:
            versions[name] = _version(name)
        found = versions[name]
        wanted = f"{name}{requirement.specifier}"
        if found is None:
            wrong[wanted] = "which is not installed"
        elif not _satisfies(requirement.specifier, found):
            wrong[wanted] = f"installed is {found}"
    if not wrong:
        return None
    what = ", and ".join(f"{wanted}, {state}" for wanted, state in wrong.items())
    return Fault(what=f"it requires {what}", cure="pip install " + " ".join(f'"{wanted}"' for wanted in wrong))


def _satisfies(wanted: SpecifierSet, found: str) -> bool:
    """Whether a version is among those wanted; one that is no version at all satisfies only "any"."""
    from packaging.version import InvalidVersion

    try:
        return wanted.contains(found, prereleases=True)
    except InvalidVersion:  # before packaging 26, which says no
        return not wanted


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
