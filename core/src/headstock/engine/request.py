"""One request: its prompt, how it samples, what it has produced, and why it ended."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from headstock.engine.detokenizer import Detokenizer
from headstock.engine.sampling import SamplingParams

FinishReason = Literal["stop", "length", "error"]


class Completion(NamedTuple):
    """What a request came to.

    `finish_reason` is "stop" (an end token or a stop string), "length" (max_tokens or the context), or "error", where
    `error` says what happened. `tokens` include the end token, `text` neither it nor the stop string.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    error: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way through the runner.

    `limit` is the most tokens it may produce, `slot` its row of the page table, −1 while it has none.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int]
    detokenizer: Detokenizer
    seed: int = field(init=False)
    slot: int = -1
    cached: int = 0  # prompt tokens already run
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed

    @property
    def total_tokens(self) -> int:
        """The most tokens the cache will ever hold for it; the last one produced is never cached."""
        return len(self.prompt) + self.limit - 1

    def push(self, token: int) -> str:
        """Takes the next token and returns the text that it completes; sets `finish_reason` when it is the last."""
        self.tokens.append(token)
        ended = token in self.stop_ids
        text = "" if ended else self.detokenizer.push(token)
        if ended or self.detokenizer.stopped_by is not None:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.limit:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self.detokenizer.finish()
        if text:
            self.pieces.append(text)
        return text

    def fail(self, error: str) -> None:
        """Ends the request for a fault of its own; others go on."""
        self.finish_reason, self.error = "error", error

    def completion(self) -> Completion:
        assert self.finish_reason is not None, "asked of a request that is still running"
        return Completion("".join(self.pieces), self.tokens, len(self.prompt), self.finish_reason, self.error)
