"""What plugins print, kept out of what programs read."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress


def stdout_to_stderr() -> AbstractContextManager[None]:
    """Keeps what a plugin prints, or has C code or a process print, out of what programs read."""
    return _DIVERSION


class _Diversion(AbstractContextManager[None]):
    """Standard output is standard error as long as any thread is inside: a process has one of each."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._way: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._way = _diverted()
                self._way.__enter__()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._way.__exit__(None, None, None)


_DIVERSION = _Diversion()


@contextmanager
def _diverted() -> Iterator[None]:
    try:
        stdout = os.dup(1)
    except OSError:  # closed, so that nobody reads it
        yield
        return
    _flush()
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _flush() -> None:
    """Writes what Python's own stream and C's library hold back where standard output is no terminal."""
    with suppress(AttributeError, OSError, ValueError):  # there may be none, or nobody who reads it
        sys.__stdout__.flush()  # type: ignore[union-attr]
    with suppress(AttributeError, ValueError):  # neither is called so everywhere
        ctypes.pythonapi.fflush(ctypes.c_void_p.in_dll(ctypes.pythonapi, "stdout"))
