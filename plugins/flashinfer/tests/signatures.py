"""Compares the stand-in with the FlashInfer that is on the path: `python signatures.py`, by hand, on any machine.

Everything that the stand-in takes, FlashInfer has to take under the same name, in the same place and with the same
default. FlashInfer may take more. Prints what differs, and exits with 1 where something does.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module

import standin

from headstock_flashinfer.accessor import INSIDE

METHODS = {
    "BatchDecodeWithPagedKVCacheWrapper": ("__init__", "plan", "run", "reset_workspace_buffer"),
    "BatchPrefillWithPagedKVCacheWrapper": ("__init__", "plan", "run", "reset_workspace_buffer"),
    "BatchPrefillWithRaggedKVCacheWrapper": ("__init__", "plan", "run", "reset_workspace_buffer"),
}
FUNCTIONS = ("merge_state_in_place", "append_paged_kv_cache")


def differences(name: str, told: object, real: object) -> list[str]:
    ours, theirs = (inspect.signature(each).parameters for each in (told, real))
    found = []
    for parameter in ours.values():
        other = theirs.get(parameter.name)
        if other is None:
            found.append(f"{name}: FlashInfer takes no {parameter.name}")
        elif other.default != parameter.default:
            found.append(f"{name}: {parameter.name} is {other.default!r} by default, not {parameter.default!r}")
    positional = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    expected = [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD][: len(positional)]
    if positional != expected:
        found.append(f"{name}: given in the order {positional}, taken in the order {expected}")
    missing = [p.name for p in theirs.values() if p.default is p.empty and p.kind in (0, 1) and p.name not in ours]
    return found + [f"{name}: FlashInfer requires {each}" for each in missing]


def main() -> int:
    flashinfer, decode = import_module("flashinfer"), import_module("flashinfer.decode")
    found = []
    for cls, methods in METHODS.items():
        for method in methods:
            told, real = (getattr(getattr(module, cls), method) for module in (standin, flashinfer))
            if (cls, method) == ("BatchDecodeWithPagedKVCacheWrapper", "plan"):
                real = getattr(flashinfer, cls)._plan_impl  # to which `plan` passes its keywords
            found += differences(f"{cls}.{method}", told, real)
    for function in FUNCTIONS:
        found += differences(function, getattr(standin, function), getattr(flashinfer, function))
    source = inspect.getsource(decode.BatchDecodeWithPagedKVCacheWrapper)
    found += [f"no wrapper has {name}" for name in INSIDE if name not in source]
    lacking = standin.Library(flashinfer).lacks()
    print(flashinfer.__version__, *(found or ["as the stand-in"]), *lacking, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
