"""Which of FlashInfer's kernels serves what: from a committed table of measurements, or as the options say.

Free of torch and of FlashInfer. FlashInfer's own "auto" is never used: an upgrade of it could then change the kernel,
and with it the speed and the bits, without a word.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headstock import BackendSpec, HeadstockError

Kernel = Literal["fa2", "fa3"]


class Options(BaseModel):
    """Overrides of the committed table, one per use; "auto" leaves the choice to it.

    A kernel that cannot do what the model asks is refused when the backend starts, never replaced by another.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode: Literal["auto", "fa2", "fa3"] = Field(default="auto", description="kernels of absorbed decode")
    extend: Literal["auto", "fa2", "fa3"] = Field(default="auto", description="kernels of absorbed extend")


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels of absorbed attention, by use. Expanded attention is always fa3, whose log-sum-exp is exact."""

    decode: Kernel
    extend: Kernel


def choose(spec: BackendSpec) -> Choice:
    """The kernels for `spec`, whose options are `Options` or None.

    Raises HeadstockError where the options name a kernel that cannot do what `spec` asks.
    """
    options = spec.options if isinstance(spec.options, Options) else Options()
    return Choice(_kernel("decode", options.decode, spec), _kernel("extend", options.extend, spec))


def _kernel(use: str, wanted: str, spec: BackendSpec) -> Any:
    if wanted != "auto":
        if lack := lacks(wanted, spec):
            raise HeadstockError(
                f"FlashInfer's {wanted} cannot serve {use} here", given=lack, works="auto",
                type=f"--backend-option flashinfer-mla.{use}=auto",
            )  # fmt: skip
        return wanted
    found = [entry for entry in _table()["entries"] if entry["use"] == use and not lacks(entry["kernel"], spec)]
    able = [
        entry["kernel"] for entry in found
        if spec.compute_capability in entry.get("compute_capability", [spec.compute_capability])
        and spec.num_heads in entry.get("num_heads", [spec.num_heads])
    ]  # fmt: skip
    if not able:
        raise HeadstockError("no kernel of FlashInfer gives an exact log-sum-exp here", works="a GPU of sm_90")
    return able[0]


def lacks(kernel: str, spec: BackendSpec) -> str:
    """Why `kernel` cannot do what `spec` asks in words; empty where it can."""
    if kernel == "fa3" and spec.compute_capability != 90:
        return f"sm_{spec.compute_capability}, it runs on sm_90"
    if kernel == "fa2" and spec.lse:
        return "a log-sum-exp, which it sums of weights rounded to 16 bits"
    return ""


def origin() -> str:
    """Where the table was measured, in words."""
    return f"choice.json, measured on {_table()['hardware']} with FlashInfer {_table()['version']}"


@cache
def _table() -> dict[str, Any]:
    text = resources.files("headstock_flashinfer_mla").joinpath("choice.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
