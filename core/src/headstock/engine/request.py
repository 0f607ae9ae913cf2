"""One request: its prompt, how it samples, what it has produced, and why it ended."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from headstock.engine.detokenizer import Detokenizer
from headstock.engine.sampling import SamplingParams
from headstock.kv.radix import Node

FinishReason = Literal["stop", "length", "error", "abort"]


class Completion(NamedTuple):
    """What a request came to.

    `finish_reason` is "stop" (an end token or a stop string), "length" (max_tokens or the context), "abort", or
    "error", where `error` says what happened. `tokens` include the end token, `text` neither it nor the stop string.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    error: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """One sample of a prompt on its way through the runner.

    `ids` are the prompt's tokens and those produced, `limit` the most it may produce. Requests are served in `order`:
    of higher priority first, then as they came. While it runs, `slot` is its row of the page table (−1 while it has
    none), `node` the end of what it shares with the prefix cache, and the `fill` first ids are those it had when it
    was admitted: from there on it decodes. `heard` is when it came or had its latest token, by the clock of
    `time.perf_counter`.
    """

    number: int
    sample: int
    ids: list[int]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int]
    detokenizer: Detokenizer
    seed: int
    priority: int = 0
    namespace: Hashable = None
    heard: float = 0.0
    num_prompt: int = field(init=False)
    slot: int = -1
    node: Node | None = None
    fill: int = 0
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""

    def __post_init__(self) -> None:
        self.num_prompt = len(self.ids)

    @property
    def order(self) -> tuple[int, int, int]:
        """What requests are sorted by: the least is served first."""
        return -self.priority, self.number, self.sample

    @property
    def num_tokens(self) -> int:
        """How many tokens it has produced."""
        return len(self.ids) - self.num_prompt

    @property
    def total_tokens(self) -> int:
        """The most tokens the cache will ever hold for it; the last one produced is never cached."""
        return self.num_prompt + self.limit - 1

    def push(self, token: int) -> str:
        """Takes the next token and returns the text that it completes; sets `finish_reason` when it is the last."""
        self.ids.append(token)
        ended = token in self.stop_ids
        text = "" if ended else self.detokenizer.push(token)
        if ended or self.detokenizer.stopped_by is not None:
            self.finish_reason = "stop"
        elif self.num_tokens == self.limit:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self.detokenizer.finish()
        if text:
            self.pieces.append(text)
        return text

    def end(self, reason: Literal["error", "abort"], error: str = "") -> str:
        """Ends the request before its time, while others go on; returns the text that was held back."""
        self.finish_reason, self.error = reason, error
        text = self.detokenizer.finish()
        self.pieces.append(text)
        return text

    def completion(self) -> Completion:
        assert self.finish_reason is not None, "asked of a request that is still running"
        tokens = self.ids[self.num_prompt :]
        return Completion("".join(self.pieces), tokens, self.num_prompt, self.finish_reason, self.error)
