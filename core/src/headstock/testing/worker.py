"""`python -m headstock.testing.worker`: the process that `headstock check` can afford to lose.

It runs numbered cases of a suite and writes a JSON line for each to the file descriptor that it is given, since stdout
belongs to the kernels. A device that a failure has left unusable ends it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from queue import Queue
from threading import Event, Thread
from typing import Any

from headstock.testing.suite import Outcome, Suite

UNUSABLE = 77
"""How a worker ends whose device an outcome, already told, has left unusable."""


def outcomes(
    name: str, options: dict[str, Any], suite: Suite, timeout: float, jobs: int = 1
) -> Iterator[tuple[int, Outcome]]:
    """Every outcome of `suite`, which has these options, with its number, from `jobs` processes at a time.

    One that dies or takes longer than `timeout` seconds over a case fails that case, and another goes on after it.
    """
    found: Queue[tuple[int, Outcome] | None] = Queue()
    stop = Event()

    def share(first: int) -> None:
        try:
            for number, outcome in _share(name, options, suite, timeout, range(first, len(suite.everything()), jobs)):
                found.put((number, outcome))
                if stop.is_set():
                    return
        finally:
            found.put(None)

    threads = [Thread(target=share, args=(first,), daemon=True) for first in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        running = jobs
        while running:
            if (each := found.get()) is None:
                running -= 1
            else:
                yield each
    finally:
        stop.set()


def _share(
    name: str, options: dict[str, Any], suite: Suite, timeout: float, numbers: range
) -> Iterator[tuple[int, Outcome]]:
    """The outcomes of some cases, one process after another, each beginning after the case that ended the last."""
    everything = suite.everything()
    while numbers:
        done = 0
        for outcome in _one_process(name, options, numbers, timeout):
            case = everything[numbers[done]]
            if isinstance(outcome, str):
                told = suite.describe(case, RuntimeError(outcome))
                outcome = Outcome(case.name, getattr(case, "law", "honesty"), "failed", told)
            yield numbers[done], outcome
            done += 1
        numbers = numbers[done:]


def _one_process(name: str, options: dict[str, Any], numbers: range, timeout: float) -> Iterator[Outcome | str]:
    """Outcomes of one worker; last, if it did not end of its own, what became of it, in words."""
    (read, write), ended = os.pipe(), 0
    command = [
        sys.executable,
        "-m",
        "headstock.testing.worker",
        json.dumps([name, options, [numbers.start, numbers.stop, numbers.step], write]),
    ]
    with subprocess.Popen(command, pass_fds=[write], stdout=sys.stderr, stdin=subprocess.DEVNULL) as worker:
        os.close(write)
        with os.fdopen(read, encoding="utf-8") as lines:
            try:
                while True:
                    if not select.select([lines], [], [], timeout)[0]:
                        worker.kill()
                        yield f"it did not end within {timeout:g} s"
                        return
                    if not (line := lines.readline()):
                        break
                    yield Outcome(**json.loads(line))
                    ended += 1
            finally:
                if worker.poll() is None and sys.exc_info()[0] is not None:
                    worker.kill()
        code = worker.wait()
    if code == UNUSABLE or ended == len(numbers):
        return
    if code < 0:
        yield f"it killed the process with {signal.Signals(-code).name}"
    else:
        yield f"it ended the process with exit code {code}"


def _usable(suite: Suite) -> bool:
    try:
        suite.device.synchronize()
    except Exception:  # an earlier kernel's fault, which every later call would report again
        return False
    return True


def main() -> None:
    name, options, numbers, descriptor = json.loads(sys.argv[1])
    suite = Suite(name, **options)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        for each in suite.everything()[slice(*numbers)]:
            outcome = suite.outcome(each)
            print(json.dumps(asdict(outcome)), file=out, flush=True)
            if not outcome.good and not _usable(suite):
                out.flush()
                os._exit(UNUSABLE)


if __name__ == "__main__":
    main()
