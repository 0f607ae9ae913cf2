"""The standard streams of a command: there even where the caller closed them, and able to write any text."""

from __future__ import annotations

import errno
import io
import os
import sys

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What a write fails with where the place that it goes to is at fault."""


def open_streams() -> None:
    """Opens what the caller closed on the null device, and lets a stream replace what its encoding has no bytes for.

    The null device takes the descriptor that is free, or the next file to be opened would get what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def drop_output() -> None:
    """Sends what is still to be written to standard output nowhere, or Python complains when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
