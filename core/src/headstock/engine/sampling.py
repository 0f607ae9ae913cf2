"""Sampling parameters: how one request picks its tokens and when it ends."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from headstock.errors import RequestError

Text = Annotated[str, StringConstraints(strict=True, min_length=1)]
TokenId = Annotated[int, Field(strict=True, ge=0)]


class SamplingParams(BaseModel):
    """How one request picks its tokens and when it ends; immutable, checked on construction.

    The filters apply in the order of `transformers`: temperature, top_k, top_p, min_p. Each description below
    says which values are allowed, and is what a refusal prints.

    Raises RequestError for a value out of range, of another type, or under a name that does not exist.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(
        0.0, strict=True, ge=0, allow_inf_nan=False, description="a finite number ≥ 0, where 0 is greedy"
    )
    top_k: int = Field(0, strict=True, ge=0, lt=2**31, description="an integer in [0, 2^31), where 0 keeps every token")
    top_p: float = Field(1.0, strict=True, gt=0, le=1, description="a number in (0, 1], where 1 keeps every token")
    min_p: float = Field(0.0, strict=True, ge=0, le=1, description="a number in [0, 1], where 0 keeps every token")
    seed: int | None = Field(
        None, strict=True, ge=0, lt=2**63, description="an integer in [0, 2^63), or None to draw one per request"
    )
    max_tokens: int = Field(256, strict=True, ge=1, description="an integer ≥ 1")
    stop: tuple[Text, ...] = Field((), description="a list of non-empty strings")
    stop_token_ids: tuple[TokenId, ...] = Field((), description="a list of token ids ≥ 0")
    ignore_eos: bool = Field(False, strict=True, description="true or false")

    def __init__(self, /, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._refusal(str(error.errors()[0]["loc"][0]), values) from None

    @classmethod
    def _refusal(cls, name: str, values: dict[str, Any]) -> RequestError:
        if name in cls.model_fields:
            return RequestError(
                f"{name} is out of range or of the wrong type",
                given=repr(values[name])[:80],
                works=cls.model_fields[name].description,
            )
        near = get_close_matches(name, cls.model_fields, n=1)
        return RequestError(
            "unknown sampling parameter", given=name, works=", ".join(cls.model_fields), type=near[0] if near else None
        )

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one; the filters and the seed then change nothing."""
        return self.temperature == 0

    def check_stops(self, vocab_size: int) -> None:
        """Raises RequestError for a token to stop at that a model of so many never gives."""
        if strange := [token for token in self.stop_token_ids if token >= vocab_size]:
            what, works = "stop_token_ids has a token outside the vocabulary", f"0…{vocab_size - 1}"
            raise RequestError(what, given=strange[0], works=works)
