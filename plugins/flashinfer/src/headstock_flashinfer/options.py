"""The options of the backend: which of FlashInfer's kernels serves what, where the table is not to decide."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """Overrides of the committed table, one per use; "auto" leaves the choice to it.

    A kernel that cannot do what the model asks is refused when the backend starts, never replaced by another.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: Literal["auto", "fa2", "fa3"] = Field(default="auto", description="kernels of paged extend")
    ragged: Literal["auto", "fa2", "fa3"] = Field(default="auto", description="kernels of ragged attention")
    decode: Literal["auto", "tensor-cores", "cuda-cores", "fa3"] = Field(
        default="auto", description="kernels of decode"
    )
    extend: Literal["auto", "paged", "split"] = Field(
        default="auto", description="new tokens behind a prefix: one paged call, or ragged and paged, merged"
    )
