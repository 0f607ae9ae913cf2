"""`python -m headstock.testing.worker`: the process that `headstock check` can afford to lose.

It runs cases of a suite from one number on and writes a JSON line when each begins and when each has ended, to the file
descriptor that it is given: stdout belongs to the kernels. A device that a failure has left unusable ends it.
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
from typing import Any

from headstock.testing.suite import Outcome, Suite


def outcomes(name: str, options: dict[str, Any], suite: Suite, timeout: float) -> Iterator[Outcome]:
    """Every outcome of `suite`, which has these options, from processes of their own.

    One that dies or takes longer than `timeout` seconds over a case fails that case, and the next goes on after it.
    """
    everything, done = suite.everything(), 0
    while done < len(everything):
        ended = 0
        for outcome in _one_process(name, options, done, timeout):
            if isinstance(outcome, str):
                case = everything[done + ended]
                told = suite.describe(case, RuntimeError(outcome))
                outcome = Outcome(case.name, getattr(case, "law", "honesty"), "failed", told)
            ended += 1
            yield outcome
        done += ended


def _one_process(name: str, options: dict[str, Any], start: int, timeout: float) -> Iterator[Outcome | str]:
    """Outcomes of one worker; last, if it did not end of its own, what became of it, in words."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "headstock.testing.worker", json.dumps([name, options, start, write])]
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
            finally:
                if worker.poll() is None and sys.exc_info()[0] is not None:
                    worker.kill()
        code = worker.wait()
    if code < 0:
        yield f"it killed the process with {signal.Signals(-code).name}"
    elif code:
        yield f"it ended the process with exit code {code}"


def _usable(suite: Suite) -> bool:
    try:
        suite.device.synchronize()
    except Exception:  # an earlier kernel's fault, which every later call would report again
        return False
    return True


def main() -> None:
    name, options, start, descriptor = json.loads(sys.argv[1])
    suite = Suite(name, **options)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        for each in suite.everything()[start:]:
            outcome = suite.outcome(each)
            print(json.dumps(asdict(outcome)), file=out, flush=True)
            if not outcome.good and not _usable(suite):
                return


if __name__ == "__main__":
    main()
