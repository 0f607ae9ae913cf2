"""The engine: many requests through one runner, each added, streamed and aborted while the others go on."""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from headstock.engine.intake import check_options, longest_answer, token_ids
from headstock.engine.request import Completion, Request
from headstock.engine.sampling import SamplingParams
from headstock.engine.scheduler import Plan, Scheduler
from headstock.engine.stats import EngineStats, Stopwatch
from headstock.engine.tokenizer import Tokenizer
from headstock.engine.trace import Trace
from headstock.errors import HeadstockError, OutOfPages
from headstock.runner.runner import ModelRunner
from headstock.runner.sampler import Sampler, SamplingRow

NOT_FINITE = "the model's logits are not finite: wrong weights, or a dtype too narrow for them"


class Output(NamedTuple):
    """What a step brought one sample of a request.

    `token` is None where there is none: the sample failed or was aborted. `text` is what became certain with it, often
    nothing. `completion` comes with the last output.
    """

    request: int
    sample: int
    token: int | None
    text: str
    completion: Completion | None = None


class Engine:
    """Serves requests together, step by step: a step is one forward of the runner, prompts and decoding mixed.

    Prompts share the pages of common beginnings (`prefix_cache`). A request gets the same tokens whatever its company,
    the cache and the budget, up to the rounding of the backends. An engine belongs to one thread; `check` verifies the
    accounting of all pages after every step. Close it, or use it in a `with` statement, to give the cache back.

    A KeyboardInterrupt may come at any time. One that finds the engine amid its accounts, not in a forward, leaves them
    torn: nothing but `close` is possible then, which takes back what the engine has of the runner's cache and rows, and
    leaves what others have.
    """

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer, *, prefix_cache: bool = True, check: bool = False):
        self.runner, self.tokenizer, self.check = runner, tokenizer, check
        self.scheduler = Scheduler(runner.pages, runner.limits.max_tokens, prefix_cache)
        self._live: dict[int, list[Request]] = {}  # by number, the samples that have not ended
        self._sound = True  # False while accounts are kept, and for good where that was interrupted
        self._leaving: list[int] = []  # aborted amid a step
        self._streams: dict[int, deque[Output]] = {}
        self._outputs: list[Output] = []  # of requests that nobody streams
        self._added = self._steps = self._prefill_tokens = self._decode_tokens = 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self._finished: Counter[str] = Counter()
        self._first_token, self._next_token = Stopwatch(), Stopwatch()
        self._trace: Trace | None = None

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        priority: int = 0,
        namespace: Hashable = None,
        called: str = "the prompt",
    ) -> int:
        """Queues a prompt, text or token ids, and returns the number that its outputs carry.

        Of `n` samples, sample i draws with seed + i; they share the prompt's pages. Higher priority goes first, for as
        long as it keeps coming, and equals in the order they came. Only prompts of one `namespace` share cached pages.
        Raises RequestError, naming the prompt as `called`, for one that can never be served: empty, as long as the
        context, or larger with its output than the whole cache.
        """
        params = SamplingParams() if params is None else params
        check_options(params, n, priority, namespace)
        ids = token_ids(prompt, self.tokenizer, called)
        limit = longest_answer(self.runner, ids, params, called)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stop_ids, number = self.tokenizer.stop_ids(params), self._added
        samples = [
            Request(
                number=number,
                sample=sample,
                ids=list(ids),
                params=params,
                limit=limit,
                stop_ids=stop_ids,
                detokenizer=self.tokenizer.detokenizer(params.stop),
                seed=(seed + sample) % 2**63,
                priority=priority,
                namespace=namespace,
                heard=time.perf_counter(),
            )
            for sample in range(n)
        ]
        with self._accounts():
            for request in samples:
                self.scheduler.add(request)
            self._live[number] = samples
            self._added += 1
        return number

    def step(self) -> list[Output]:
        """Runs one step; returns what it brought, and what aborts have since the last one.

        Outputs of requests that are streamed go to their streams. Raises OutOfPages when all requests wait for pages
        or rows that are held outside this engine, and whatever a backend raises: no request has lost anything then,
        and the next step runs it again.
        """
        self._run()
        outputs, self._outputs = self._outputs, []
        return outputs

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, n: int = 1, priority: int = 0,
        namespace: Hashable = None,
    ) -> Iterator[Output]:  # fmt: skip
        """Queues a prompt as `add_request` does; its outputs, as they come, for whose sake steps are run.

        Several streams may be read by turns. Closing one before its end aborts its request, and so does a step that
        fails while it is read.
        """
        number = self.add_request(prompt, params, n=n, priority=priority, namespace=namespace)
        self._streams[number] = outputs = deque[Output]()
        stream = self._follow(number, outputs)
        next(stream)  # begun, so that closing it aborts
        return stream

    def abort(self, number: int) -> None:
        """Ends a request; its last outputs come with the next step. One that has ended already is left alone.

        Amid a step, as when a stream is collected as garbage, it waits for the next one.
        """
        if not self._sound:
            self._leaving.append(number)
            return
        with self._accounts():
            for request in list(self._live.get(number, ())):
                self._retire(request, None, request.end("abort"))

    @property
    def busy(self) -> bool:
        """Whether another step would do or bring anything."""
        return bool(self._live or self._outputs)

    @property
    def stats(self) -> EngineStats:
        """What has been done so far, and what is held now."""
        return EngineStats(
            steps=self._steps,
            prefill_tokens=self._prefill_tokens,
            prefill_seconds=self._prefill_seconds,
            decode_tokens=self._decode_tokens,
            decode_seconds=self._decode_seconds,
            cached_tokens=self.scheduler.cached_tokens,
            preemptions=self.scheduler.preemptions,
            finished=dict(self._finished),
            first_token=self._first_token.latency,
            next_token=self._next_token.latency,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages=self.runner.pages.allocator.num_pages - 1,
            free_pages=self.runner.pages.allocator.num_free,
            cached_pages=self.scheduler.cache.num_pages,
        )

    def record(self, path: str | Path | None) -> None:
        """Writes a line per forward to `path` from now on, see `Trace`; None, another path or `close` ends it."""
        before, self._trace = self._trace, None if path is None else Trace(path, self.runner.page_size)
        if before is not None:
            before.close()

    def reset_cache(self) -> None:
        """Forgets all cached prefixes; raises PageError while requests run on some."""
        self.scheduler.cache.reset()

    def reset(self) -> None:
        """Drops all requests and cached prefixes, gives back every page and row, and goes on."""
        if self._sound:
            self._sound = False
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self.scheduler.remove(request, store=False)
            self.reset_cache()
        else:
            self.runner.pages.release(self.scheduler)
            self.scheduler.forget()
        for held in (self._live, self._streams, self._outputs, self._leaving):
            held.clear()
        self._sound = True

    def close(self) -> None:
        """Does what `reset` does, and ends the record. The engine may be used again."""
        self.reset()
        self.record(None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _accounts(self) -> Iterator[None]:
        """Where it changes who holds what. Nobody can come in between, and whatever is raised leaves it torn."""
        if not self._sound:
            raise HeadstockError("the engine is in a step, or was interrupted amid its accounts", works="close()")
        self._sound = False
        yield
        self._sound = True

    def _run(self) -> None:
        while self._leaving:
            self.abort(self._leaving.pop())
        if not self._live:
            return
        started = time.perf_counter()
        with self._accounts():
            plan, lengths = self.scheduler.schedule(), self.runner.pages.lengths
            cached = [lengths[request.slot] for request, _ in plan]
            try:
                drawn, failed, graph = self._forward(plan, cached)
            except BaseException:
                for (request, _), length in zip(plan, cached, strict=True):
                    lengths[request.slot] = length  # a device may tell of its failure late, when tokens are counted
                self._sound = True
                raise
            now = time.perf_counter()
            for (request, count), at, token, broken in zip(plan, cached, drawn, failed, strict=True):
                self._take(request, at, at + count, token, broken, now)
            self._count(plan, cached, time.perf_counter() - started)
        if self._trace is not None:
            self._record(self._trace, plan, cached, graph, now - started)
        if self.check:
            self.scheduler.check()

    def _record(self, trace: Trace, plan: Plan, cached: Sequence[int], graph: bool, seconds: float) -> None:
        counts = [count for _, count in plan]
        ends = [at + count for at, count in zip(cached, counts, strict=True)]
        try:
            trace.write(counts, ends, split=self.runner.mixed == "split", graph=graph, seconds=seconds)
        except OSError as error:  # requests go on without it
            self.runner.notices.append(f"the record of forwards ends, {trace.path}: {error.strerror}")
            self.record(None)

    def _forward(self, plan: Plan, cached: Sequence[int]) -> tuple[list[int], list[bool], bool]:
        """The next token of each row, whether it has none because its logits are not finite, and whether by a graph.

        Rows whose prompt is not complete yet are sampled as well: finite logits say that their keys and values may be
        shared.
        """
        if not plan:
            raise OutOfPages("requests wait for a cache that others hold", works="closing the runner's slots")
        tokens = [request.ids[at : at + count] for (request, count), at in zip(plan, cached, strict=True)]
        logits, sampled = self.runner.step([request.slot for request, _ in plan], tokens)
        graph = sampled is not None
        if sampled is None or not all(request.params.greedy for request, _ in plan):
            rows = [SamplingRow(request.params, request.seed, request.num_tokens) for request, _ in plan]
            sampled = Sampler(rows, logits.device)(logits)
        return sampled.tokens.tolist(), sampled.failed.tolist(), graph

    def _take(self, request: Request, before: int, after: int, token: int, broken: bool, now: float) -> None:
        """Brings a request what its row came to `now`; it had `before` tokens cached and has `after`."""
        if broken:
            self._retire(request, None, request.end("error", NOT_FINITE))
            return
        if before < request.fill <= after:
            self.scheduler.store(request)
        if after == len(request.ids):
            text = request.push(token)
            (self._next_token if request.num_tokens > 1 else self._first_token).add(now - request.heard)
            request.heard = now
            if request.finish_reason is None:
                self._put(Output(request.number, request.sample, token, text))
            else:
                self._retire(request, token, text)

    def _retire(self, request: Request, token: int | None, text: str) -> None:
        """Takes an ended request out, with its last output."""
        self.scheduler.remove(request, store=request.finish_reason != "error")
        completion = request.completion()
        self._finished[completion.finish_reason] += 1
        self._put(Output(request.number, request.sample, token, text, completion))
        self._live[request.number].remove(request)
        if not self._live[request.number]:
            del self._live[request.number]
            self._streams.pop(request.number, None)  # whose reader has what is left

    def _put(self, output: Output) -> None:
        self._streams.get(output.request, self._outputs).append(output)

    def _count(self, plan: Plan, cached: Sequence[int], seconds: float) -> None:
        total = sum(count for _, count in plan)
        decoded = sum(at >= request.fill for (request, _), at in zip(plan, cached, strict=True))
        self._steps += 1
        self._decode_tokens += decoded
        self._prefill_tokens += total - decoded
        self._decode_seconds += seconds * decoded / total
        self._prefill_seconds += seconds * (total - decoded) / total

    def _follow(self, number: int, outputs: deque[Output]) -> Iterator[Output]:
        try:
            yield Output(number, 0, None, "")  # for `stream`
            while outputs or number in self._live:
                if outputs:
                    yield outputs.popleft()
                else:
                    self._run()
        finally:
            self.abort(number)
