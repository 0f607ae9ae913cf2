"""Compiles FlashInfer's modules ahead, in processes of their own, since FlashInfer reads its environment at import."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from headstock import BackendSpec, HeadstockError, Progress
from headstock_flashinfer import toolkit
from headstock_flashinfer.modules import Module, modules
from headstock_flashinfer.store import Store

Report = Callable[[Progress], None]

STEP = re.compile(r"\[(\d+)/(\d+)\] ")
ERROR = re.compile(r"\b(error|fatal|undefined|cannot)\b")
LINES, WIDTH = 12, 200
"""How much of a compiler's error is shown."""
UNIT_BYTES = 4 << 30
"""Memory that one unit takes to compile: up to 3.4 GB, seen for fa3 with CUDA 13.0."""


def missing(spec: BackendSpec) -> tuple[Store, list[Module]]:
    """Where modules are kept, and those of `spec` that are not there."""
    store = Store.find(spec.compute_capability)
    return store, [module for module in modules(spec, store.version) if store.path(module) is None]


def prepare(spec: BackendSpec, report: Report) -> None:
    """Compiles the modules that `spec` runs and that are not there yet; `report` hears of every unit of each module.

    Raises HeadstockError with the compiler's last lines where one fails, and where nothing can be compiled.
    """
    store, absent = missing(spec)
    if not absent:
        return
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        raise HeadstockError(
            f"FlashInfer's module {absent[0].label} is not there, and FLASHINFER_DISABLE_JIT forbids to compile it",
            given=absent[0].name, works=f"its library in {store.compiled}", type="headstock prepare",
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        jobs = _jobs()
        at_once = min(2, jobs, len(absent))  # the second fills the gaps that the last units of the first leave
        environment = toolkit.environment(Path(folder), os.environ) | {
            "FLASHINFER_CUDA_ARCH_LIST": " ".join(store.architectures),
            "MAX_JOBS": str(-(-jobs // at_once)),
            "NINJA_STATUS": "[%f/%t] ",
        }
        _compile(absent, environment, report, at_once)


def _compile(absent: Sequence[Module], environment: dict[str, str], report: Report, at_once: int) -> None:
    """Compiles some modules at a time; the first failure stops all."""
    running: list[subprocess.Popen[str]] = []
    lock = Lock()

    def tell(step: Progress) -> None:
        with lock:
            report(step)

    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(_compile_one, module, environment, tell, running) for module in absent]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                for process in running:
                    _stop(process)
                wait(futures, 0.1)


def _compile_one(
    module: Module, environment: dict[str, str], tell: Report, running: list[subprocess.Popen[str]]
) -> None:
    what, finished, total = f"compiling {module.label}", 0, 1
    tell(Progress(what, finished, total))
    command = [sys.executable, "-P", "-m", "headstock_flashinfer.child", module.generator, json.dumps(module.arguments)]
    said: list[str] = []
    with _started(command, environment, running) as process:
        assert process.stdout is not None, "it is piped"
        for line in process.stdout:
            said.append(line.rstrip())
            if step := STEP.match(line):
                finished, total = map(int, step.groups())
                tell(Progress(what, finished, total))
    if process.returncode:
        raise HeadstockError("\n  ".join([f"FlashInfer's module {module.label} does not compile:", *_last(said)]))
    if finished < total:  # another process has compiled it meanwhile, and ninja found nothing to do
        tell(Progress(what, total, total))


@contextmanager
def _started(
    command: list[str], environment: dict[str, str], running: list[subprocess.Popen[str]]
) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, so that the compilers that it starts can be stopped with it."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    running.append(process)
    with process:
        yield process


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


def _last(said: Sequence[str]) -> list[str]:
    """What the compiler said of its failure: the lines after the command that failed, else the last of all."""
    lines = [line[:WIDTH] for line in said if line.strip()]
    failed = next((number for number, line in enumerate(lines) if "FAILED: " in line), None)
    if failed is None:
        return lines[-LINES:]
    end = next((number for number, line in enumerate(lines) if line.startswith("ninja: build stopped")), len(lines))
    lines = [line for line in lines[failed + 2 : end] if not STEP.match(line)]
    first = next((number for number, line in enumerate(lines) if ERROR.search(line)), 0)
    return lines[first:][:LINES] if len(lines) > LINES else lines


def _jobs() -> int:
    """Units to compile at a time: as MAX_JOBS says, else one per core, and no more than memory is there for."""
    asked = os.environ.get("MAX_JOBS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // UNIT_BYTES))
