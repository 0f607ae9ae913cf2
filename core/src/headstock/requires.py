"""The packages a plugin's distribution requires, checked against what is installed; nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from headstock.offer import Fault


def missing_packages(requires: Iterable[str], versions: dict[str, str | None]) -> Fault | None:
    """A fault for the first requirement that is absent or at a wrong version, or None.

    `requires` holds the lines of a distribution's own metadata (PEP 508); extras are not asked for. `versions`
    remembers look-ups by distribution name, so that many plugins cost one look-up per package.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            return Fault(what=f"its metadata is damaged: {error}", cure="reinstall the plugin")
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name
        if name not in versions:
            versions[name] = _version(name)
        found = versions[name]
        wanted = f"{name}{requirement.specifier}"
        if found is None:
            return Fault(what=f"it requires {wanted}, which is not installed", cure=f'pip install "{wanted}"')
        if not requirement.specifier.contains(found, prereleases=True):
            return Fault(what=f"it requires {wanted}, installed is {found}", cure=f'pip install "{wanted}"')
    return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
