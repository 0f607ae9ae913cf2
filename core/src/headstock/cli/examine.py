"""`python -m headstock.cli.examine REPORT [PLUGIN]`: the process that `doctor` can afford to lose.

It loads one plugin as the runner would, or without one torch, and writes what it found to REPORT as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from headstock.errors import HeadstockError
from headstock.load import load_backend, load_layout, resolve
from headstock.offer import Candidate, Fault
from headstock.plugins import Plugin, describe_fault, installed

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
        return {}, [Fault(what=f"doctor_facts: {describe_fault(error).what}", cure=cure)]


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
        return [Fault(what=str(error), cure=f"reinstall or remove it: pip uninstall {candidate.distribution}")]
    return []


def torch() -> dict[str, str]:
    """The version of torch and the device that runs by default, by name."""
    import torch

    from headstock.device import Device

    device = Device.open()
    capability = f", sm_{device.compute_capability}" if device.compute_capability else ""
    return {"torch": torch.__version__, "device": f"{device.name}{capability}"}


if __name__ == "__main__":
    report, *named = sys.argv[1:]
    Path(report).write_text(json.dumps(plugins(*named) if named else torch()), encoding="utf-8")
