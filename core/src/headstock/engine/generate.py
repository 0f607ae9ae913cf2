"""Generation: a list of prompts through one runner, many at once, until each has ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headstock.engine.request import Completion, Request
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.errors import OutOfPages, RequestError
from headstock.runner.runner import ModelRunner
from headstock.runner.sampler import Sampler, SamplingRow

OnText = Callable[[int, str], None]
"""Called with a prompt's index and each piece of its text as it becomes certain."""


@dataclass(slots=True)
class Timing:
    """Tokens and seconds by phase: prompt tokens run, tokens produced by decoding, and what each took."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    first_token_seconds: float | None = None


@dataclass(slots=True)
class Generator:
    """Serves requests together: prompts are run as they are admitted, then every running request decodes in one batch.

    A request is admitted when a row is free and the cache can hold all it may ever need, so that none has to be
    interrupted; until then it waits in order. A prompt longer than `max_tokens` of one forward runs in chunks.
    """

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
        requests = [self._request(i, list(p), own) for i, (p, own) in enumerate(zip(prompts, each, strict=True))]
        waiting, running = deque(requests), list[Request]()
        started = time.perf_counter()
        try:
            while waiting or running:
                admitted = self._admit(waiting)
                running += admitted
                if admitted:
                    self._prefill(admitted, on_text)
                    if self.timing.first_token_seconds is None:
                        self.timing.first_token_seconds = time.perf_counter() - started
                elif running:
                    self._decode(running, on_text)
                else:
                    raise OutOfPages("requests wait for a cache that others hold", works="closing the runner's slots")
                running = self._retire(running, on_done)
        finally:
            for request in requests:
                self._close(request)
        return [request.completion() for request in requests]

    def _request(self, index: int, prompt: list[int], params: SamplingParams) -> Request:
        runner = self.runner
        if not prompt:
            raise RequestError(f"prompt {index} is empty", works="at least one token")
        vocab = runner.config.vocab_size
        if not all(0 <= token < vocab for token in prompt):
            raise RequestError(f"prompt {index} holds a token outside the vocabulary", works=f"0…{vocab - 1}")
        if len(prompt) >= runner.max_context:
            raise RequestError(
                f"prompt {index} leaves no room for an answer",
                given=f"{len(prompt)} tokens in a context of {runner.max_context}",
                works="a shorter prompt" + (", or a longer context" if self._context_can_grow else ""),
                type=f"--max-context {runner.config.max_context}" if self._context_can_grow else None,
            )
        request = Request(
            index=index,
            prompt=prompt,
            params=params,
            limit=min(params.max_tokens, runner.max_context - len(prompt)),
            stop_ids=self.tokenizer.stop_ids(params),
            detokenizer=self.tokenizer.detokenizer(params.stop),
        )
        if request.total_tokens > runner.memory.kv_tokens:
            raise RequestError(
                f"prompt {index} with its answer can never fit into the KV cache",
                given=f"{len(prompt)} prompt + {request.limit} new tokens, {runner.memory.kv_tokens} in the cache",
                works="a larger cache, or fewer new tokens",
                type=f"--kv-tokens {request.total_tokens}",
            )
        return request

    @property
    def _context_can_grow(self) -> bool:
        return self.runner.max_context < self.runner.config.max_context

    def _admit(self, waiting: deque[Request]) -> list[Request]:
        """Takes requests off the queue, in order, while a row and all the pages they may need are free."""
        pages = self.runner.pages
        admitted = []
        while waiting and pages.num_free_slots:
            request = waiting[0]
            if pages.pages_for(request.total_tokens) > pages.allocator.num_free:
                break
            request.slot = pages.open()
            pages.reserve({request.slot: request.total_tokens})
            admitted.append(waiting.popleft())
        return admitted

    def _prefill(self, requests: list[Request], on_text: OnText | None) -> None:
        """Runs prompts, at most `max_tokens` tokens a forward; a prompt's last chunk yields its first token."""
        started = time.perf_counter()
        pending = deque(requests)
        while pending:
            budget, chunks = self.runner.limits.max_tokens, list[tuple[Request, list[int]]]()
            while pending and budget:
                request = pending[0]
                chunk = request.prompt[request.cached : request.cached + budget]
                budget -= len(chunk)
                request.cached += len(chunk)
                chunks.append((request, chunk))
                if request.cached < len(request.prompt):
                    break
                pending.popleft()
            logits = self.runner.forward([r.slot for r, _ in chunks], [chunk for _, chunk in chunks])
            self.timing.prefill_tokens += sum(len(chunk) for _, chunk in chunks)
            complete = [i for i, (request, _) in enumerate(chunks) if request.cached == len(request.prompt)]
            if complete:
                logits = logits if len(complete) == len(chunks) else logits[complete]
                self._sample([chunks[i][0] for i in complete], logits, on_text)
        self.timing.prefill_seconds += time.perf_counter() - started

    def _decode(self, running: list[Request], on_text: OnText | None) -> None:
        started = time.perf_counter()
        logits = self.runner.forward([r.slot for r in running], [r.tokens[-1:] for r in running])
        self.timing.decode_tokens += self._sample(running, logits, on_text)
        self.timing.decode_seconds += time.perf_counter() - started

    def _sample(self, requests: list[Request], logits: Tensor, on_text: OnText | None) -> int:
        """Gives each request its next token, or the reason why there is none; returns how many got one."""
        rows = [SamplingRow(request.params, request.seed, len(request.tokens)) for request in requests]
        sampled = Sampler(rows, logits.device)(logits)
        tokens, failed = sampled.tokens.tolist(), sampled.failed.tolist()
        for request, token, broken in zip(requests, tokens, failed, strict=True):
            if broken:
                request.fail("the model's logits are not finite: wrong weights, or a dtype too narrow for them")
                continue
            text = request.push(token)
            if text and on_text:
                on_text(request.index, text)
        return sum(not broken for broken in failed)

    def _retire(self, running: list[Request], on_done: Callable[[int, Completion], None] | None) -> list[Request]:
        for request in running:
            if request.finish_reason is not None:
                self._close(request)
                if on_done:
                    on_done(request.index, request.completion())
        return [request for request in running if request.finish_reason is None]

    def _close(self, request: Request) -> None:
        """Gives back what a request holds, if anything: it may have failed at any point."""
        if request.slot >= 0:
            self.runner.pages.close(request.slot)
            request.slot = -1
