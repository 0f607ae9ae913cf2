"""`python -m headstock.cli.examine REPORT plugin NAME | torch | profile [CONFIG]`: what `doctor` can afford to lose.

The process loads one plugin as the runner would, or torch, or all plugins for what negotiation makes of a profile, and
writes what it found to REPORT as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstock.errors import HeadstockError
from headstock.load import load_backend, load_layout, resolve
from headstock.offer import Candidate, Fault
from headstock.plugins import Plugin, describe_fault, discover, installed

HEAVY = Fault(
    what="its manifest imports torch, for which every listing waits seconds",
    cure='offer the class by its name, backend="package.module:Class", and import torch in that module alone',
)


def plugins(name: str) -> list[dict[str, Any]]:
    """What every plugin called `name` (more than one is a fault) offers, and each fault on the way to its classes."""
    before = "torch" in sys.modules
    found = installed([name])
    heavy = [HEAVY] if "torch" in sys.modules and not before else []
    return [
        {
            "name": plugin.name,
            "distribution": f"{plugin.distribution} {plugin.version}".strip(),
            "backends": [offer.name for offer in plugin.offers],
            "facts": facts,
            "faults": [fault.model_dump() for fault in heavy + _faults(plugin) + wrong],
        }
        for plugin in found
        for facts, wrong in [_facts(plugin)]
    ]


def _facts(plugin: Plugin) -> tuple[dict[str, str], list[Fault]]:
    """What a healthy plugin tells of itself, and the fault of one that fails at that."""
    if plugin.fault is not None or "doctor_facts" not in plugin.hooks:
        return {}, []
    try:
        assert plugin.implementation is not None, "a plugin without a fault was imported"
        told = plugin.implementation.doctor_facts()
        return {str(name): str(fact) for name, fact in told.items()}, []
    except Exception as error:
        cure = f"reinstall or remove it: pip uninstall {plugin.distribution}"
        fault = describe_fault(error, cure)
        return {}, [fault.model_copy(update={"what": f"doctor_facts: {fault.what}"})]


def _faults(plugin: Plugin) -> list[Fault]:
    if plugin.fault is not None:
        return [plugin.fault]
    return [fault for candidate in plugin.candidates() for fault in _of_its_classes(candidate)]


def _of_its_classes(candidate: Candidate) -> list[Fault]:
    assert candidate.offer is not None, "a plugin without a fault offers what it puts forward"
    try:
        load_backend(candidate)
        for layout in candidate.offer.kv_layouts:
            load_layout(layout, [candidate])
        if candidate.offer.options is not None:
            resolve(candidate.offer.options, f"the options of {candidate.name}")
    except HeadstockError as error:
        return [describe_fault(error, f"reinstall or remove it: pip uninstall {candidate.distribution}")]
    return []


def torch() -> dict[str, str]:
    """The version of torch and the device that runs by default, by name."""
    import torch

    from headstock.device import Device

    device = Device.open()
    capability = f", sm_{device.compute_capability}" if device.compute_capability else ""
    return {"torch": torch.__version__, "device": f"{device.name}{capability}"}


def profile(config: str = "") -> dict[str, str]:
    """The profile that ranks the backends of the configured model, and what is to be known of it; or none."""
    from headstock.cli.hardware import Hardware
    from headstock.cli.question import question
    from headstock.cli.settings import Settings
    from headstock.negotiate import negotiate

    try:
        settings = Settings.load(Path(config) if config else None, {})
        needs, policy = question(settings, Hardware.here(settings.choices.device))
        notices = negotiate(needs, discover(), policy).notices
    except HeadstockError as error:
        return {"profile": f"nothing can be told of it: {error}"}
    if not policy.profile_file:
        return {}
    told = [notice for notice in notices if policy.profile_file in notice]
    return {"profile": "; ".join(told) or policy.profile_file}


if __name__ == "__main__":
    report, subject, *named = sys.argv[1:]
    subjects: dict[str, Callable[..., Any]] = {"plugin": plugins, "torch": torch, "profile": profile}
    Path(report).write_text(json.dumps(subjects[subject](*named)), encoding="utf-8")
