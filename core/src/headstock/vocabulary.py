"""The closed vocabularies that people, models and manifests share: device types and dtypes, by torch's names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from headstock.errors import HeadstockError

DEVICES = (
    "cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia", "xla", "vulkan", "npu", "mlu", "musa", "privateuseone",
)  # fmt: skip
"""Types of devices that compute. ROCm's is "cuda" too; the last four are what extensions of torch bring."""
DTYPES = ("bfloat16", "float16", "float32", "float64")
CACHED = (*DTYPES, "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
"""Dtypes that a cache may hold."""

MEANT = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "half": "float16", "float": "float32"}
"""What people say, and what torch calls it."""


def nearest(given: object, known: Iterable[str]) -> str:
    """The known name that was meant, perhaps; empty where none is near."""
    known, said = tuple(known), str(given).lower().replace("fp", "float")
    if MEANT.get(said) in known:
        return MEANT[said]
    longer = [name for name in known if said and name.startswith(said)]
    return next(iter(longer or get_close_matches(said, known, 1)), "")


def check_known(what: str, given: object, known: Iterable[str]) -> None:
    """Raises HeadstockError, with the known names and the nearest, where `given` is none of them."""
    known = tuple(known)
    if given not in known:
        near = nearest(given, known)
        works = f"{near}, perhaps (known: {', '.join(known)})" if near else ", ".join(known)
        raise HeadstockError(f"unknown {what}", given=given, works=works)
