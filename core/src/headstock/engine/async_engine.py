"""The engine for asyncio: one thread runs the steps, coroutines add, stream and abort requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headstock.engine.engine import Engine, Output
from headstock.engine.sampling import SamplingParams
from headstock.engine.stats import EngineStats
from headstock.errors import HeadstockError, PluginError

T = TypeVar("T")


class AsyncEngine:
    """An engine whose streams are asynchronous; it belongs to one event loop and owns the engine it is given.

    Everything that touches the engine runs in one worker thread, a call after the other, so that the event loop is
    never blocked: what is asked for in the middle of a step takes effect before the next. Steps run while there are
    requests. Close it, or use it in an `async with` statement.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="headstock-engine")
        self._streams: dict[int, asyncio.Queue[Output | Exception]] = {}
        self._steps: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def stats(self) -> EngineStats:
        """What has been done so far, and what is held now."""
        return self._engine.stats

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, n: int = 1, priority: int = 0,
        namespace: Hashable = None,
    ) -> AsyncIterator[Output]:  # fmt: skip
        """The outputs of a prompt as they come; see `Engine.add_request`.

        Whoever stops reading before the end, or is cancelled, aborts the request by it. A step that fails ends every
        stream with its error; requests that come later are served.
        """
        self._check_open()
        queue: asyncio.Queue[Output | Exception] = asyncio.Queue()
        numbers: list[int] = []

        def add() -> None:
            numbers.append(self._engine.add_request(prompt, params, n=n, priority=priority, namespace=namespace))
            self._streams[numbers[0]] = queue  # before any step can have outputs for it

        def drop() -> None:
            for number in numbers:
                self._streams.pop(number, None)
                self._engine.abort(number)  # which leaves alone what has ended

        try:
            await self._call(add)
            if self._steps is None or self._steps.done():
                self._steps = asyncio.create_task(self._run())
            while n:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                n -= output.completion is not None
                yield output
        finally:
            if not self._closed:
                self._worker.submit(drop)  # cancelled or not, it comes after `add`

    async def record(self, path: str | Path | None) -> None:
        """Writes a line per forward to `path`, see `Engine.record`; a step that fails does not end it."""
        self._check_open()
        await self._call(lambda: self._engine.record(path))

    async def reset_cache(self) -> None:
        """Forgets all cached prefixes; raises PageError while requests run on some."""
        self._check_open()
        await self._call(self._engine.reset_cache)

    async def close(self) -> None:
        """Ends what runs, each stream with an error, and gives back everything that the engine holds."""
        if self._closed:
            return
        self._closed = True
        if self._steps is not None:
            await asyncio.wait([self._steps])  # it may have been cancelled, with the loop
        await self._fail(_closed())
        await self._call(lambda: self._engine.record(None))
        self._worker.shutdown()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()

    async def _run(self) -> None:
        """Runs steps until nothing is left to do."""
        while self._engine.busy and not self._closed:
            try:
                outputs = await self._call(self._engine.step)
            except Exception as error:
                await self._fail(error)
                continue
            except SystemExit as error:
                notes = "; ".join(getattr(error, "__notes__", ()))  # the runner's, of whose step it was
                await self._fail(PluginError("a backend asked the process to exit", given=notes or error))
                continue
            for output in outputs:
                if queue := self._streams.get(output.request):
                    queue.put_nowait(output)

    async def _fail(self, error: Exception) -> None:
        """Drops all requests and tells the streams why."""

        def drop() -> list[asyncio.Queue[Output | Exception]]:
            self._engine.reset()
            return list(self._streams.values())

        for queue in await self._call(drop):
            queue.put_nowait(error)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)


def _closed() -> HeadstockError:
    return HeadstockError("the engine was closed")
