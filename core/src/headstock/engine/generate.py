"""Generation: a list of prompts through one engine, many at once, until each has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headstock.engine.engine import Engine
from headstock.engine.request import Completion
from headstock.engine.sampling import SamplingParams
from headstock.engine.stats import EngineStats
from headstock.engine.tokenizer import Tokenizer
from headstock.errors import RequestError
from headstock.runner.runner import ModelRunner

OnText = Callable[[int, str], None]
"""Called with a prompt's index and each piece of its text as it becomes certain."""


@dataclass(slots=True)
class Timing:
    """Tokens and seconds by phase: prompt tokens run, tokens produced by decoding, and what each took.

    The seconds of a step that does both are shared out by tokens.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    first_token_seconds: float | None = None

    def add(self, stats: EngineStats) -> None:
        self.prefill_tokens += stats.prefill_tokens
        self.prefill_seconds += stats.prefill_seconds
        self.decode_tokens += stats.decode_tokens
        self.decode_seconds += stats.decode_seconds


@dataclass(slots=True)
class Generator:
    """Serves lists of prompts, each list with an engine of its own: what its prompts share is run once."""

    runner: ModelRunner
    tokenizer: Tokenizer
    timing: Timing = field(default_factory=Timing)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_text: OnText | None = None,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """The completions of `prompts` (token ids), in their order.

        `params` are one for all or one each, greedy by default. Raises RequestError, before anything runs, for a prompt
        that can never be served: empty, as long as the context, or larger with its output than the whole cache.
        """
        params = SamplingParams() if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            given = f"{len(each)} for {len(prompts)} prompts"
            raise RequestError("sampling parameters are one for all prompts, or one each", given=given)
        completions: dict[int, Completion] = {}
        started = time.perf_counter()
        with Engine(self.runner, self.tokenizer) as engine:
            place = {
                engine.add_request(prompt, own, called=f"prompt {index}"): index
                for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
            }
            try:
                while engine.busy:
                    for number, _, token, text, completion in engine.step():
                        if token is not None and self.timing.first_token_seconds is None:
                            self.timing.first_token_seconds = time.perf_counter() - started
                        if text and on_text:
                            on_text(place[number], text)
                        if completion is None:
                            continue
                        completions[place[number]] = completion
                        if on_done:
                            on_done(place[number], completion)
            finally:
                self.timing.add(engine.stats)
        return [completions[index] for index in range(len(prompts))]
