"""Data of GPUs that a decision can be explained for without having one, from their vendor's specifications."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from headstock.errors import HeadstockError


class GPU(NamedTuple):
    """A GPU as negotiation and planning see it; `compute_capability` is major × 10 + minor, `memory` in GiB."""

    compute_capability: int
    num_sms: int
    memory: int


GPUS = {
    "v100": GPU(70, 80, 32),
    "t4": GPU(75, 40, 16),
    "a100": GPU(80, 108, 80),
    "a30": GPU(80, 56, 24),
    "a10": GPU(86, 72, 24),
    "a40": GPU(86, 84, 48),
    "rtx-3080": GPU(86, 68, 10),
    "rtx-3090": GPU(86, 82, 24),
    "rtx-a6000": GPU(86, 84, 48),
    "l4": GPU(89, 58, 24),
    "l40": GPU(89, 142, 48),
    "l40s": GPU(89, 142, 48),
    "rtx-4080": GPU(89, 76, 16),
    "rtx-4090": GPU(89, 128, 24),
    "rtx-6000-ada": GPU(89, 142, 48),
    "h20": GPU(90, 78, 96),
    "h100": GPU(90, 132, 80),
    "h100-pcie": GPU(90, 114, 80),
    "gh200": GPU(90, 132, 96),
    "h200": GPU(90, 132, 141),
    "b200": GPU(100, 148, 180),
    "b300": GPU(103, 160, 288),
    "rtx-5080": GPU(120, 84, 16),
    "rtx-5090": GPU(120, 170, 32),
    "rtx-pro-6000": GPU(120, 188, 96),
    "gb10": GPU(121, 48, 128),
}


def gpu(name: str) -> GPU:
    """The GPU called `name`, however it is spelled ("H200", "RTX 4090", "rtx4090"); HeadstockError where unknown."""
    spelled = {_bare(known): known for known in GPUS}
    found = spelled.get(_bare(name)) or spelled.get("rtx" + _bare(name))
    if found is None:
        near = get_close_matches(_bare(name), spelled, 1)
        works = f"{spelled[near[0]]}, perhaps" if near else ", ".join(GPUS)
        raise HeadstockError("unknown GPU", given=name, works=works)
    return GPUS[found]


def _bare(name: str) -> str:
    bare = "".join(character for character in name.lower() if character.isalnum())
    return bare.removeprefix("nvidia").removeprefix("geforce")
