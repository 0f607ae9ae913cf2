"""What `--output` names: a file for answers, locked while a run has it, or a stream that gets them in their turn."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from headstock.cli.output import Lines, OrderedStream, OutputFile, Place
from headstock.errors import HeadstockError

STREAMS = {stat.S_IFIFO: "pipe", stat.S_IFCHR: "terminal"}
OTHERS = {stat.S_IFBLK: "a disk", stat.S_IFSOCK: "a socket"}


@dataclass(frozen=True)
class Destination:
    """Where the JSON lines of a run go: to a file at `file`, its links followed, or to a `stream` that is open.

    `path` is what was given.
    """

    path: Path
    file: Path
    stream: TextIO | None = None

    @classmethod
    @contextmanager
    def claimed(cls, path: Path) -> Iterator[Destination]:
        """Keeps other runs from the file meanwhile, or holds the stream open; changes nothing.

        Raises HeadstockError with the cause where it cannot be written. The lock is on a file beside it, and ends with
        the process, however that ends. A stream is shared.
        """
        kind, file = _kind(path), Path(os.path.realpath(path))
        if kind in STREAMS:
            with _stream(path, kind) as stream:
                yield cls(path, file, stream)
        elif kind in OTHERS:
            raise unwritable(path, f"it is {OTHERS[kind]}")
        else:
            with _lock(path, file):
                yield cls(path, file)

    def opened(self, places: Mapping[int, Place]) -> AbstractContextManager[Lines]:
        """Takes the lines of a run; those that a file has at `places` stay, and all else in it goes."""
        return OrderedStream(self.stream) if self.stream else OutputFile.opened(self.file, places)


def file_name(text: str) -> Path:
    """A path that was typed for a file, where a slash at the end would be lost; HeadstockError for a folder's name."""
    if not text:
        raise unwritable("''", "it is empty")
    if os.path.isdir(text) or os.path.basename(text) in ("", ".", ".."):
        raise unwritable(text, "it is a folder" if os.path.isdir(text) else "it is the name of a folder")
    return Path(text)


def unwritable(path: object, reason: str, works: str = "--output with another file", **parts: str) -> HeadstockError:
    """The refusal of an output."""
    return HeadstockError(f"cannot write {path}: {reason}", works=works, **parts)


def occupied(path: Path, number: int, line: bytes) -> HeadstockError:
    """The refusal of an output that has a line, by number, which is no answer and would be lost."""
    given = repr(line[:60].decode(errors="replace").rstrip("\n"))
    works = "a new file, an empty one, or one with nothing but answers"
    name = os.path.realpath(path) if path.is_symlink() else path  # of /dev/stdout, the file behind it
    cure = f"--output {shlex.quote(f'{name}.answers')}"
    what = f"{path}:{number} is no answer of this program, and is not written over"
    return HeadstockError(what, given=given, works=works, type=cure)


def _kind(path: Path) -> int | None:
    """What a path leads to, as `stat` has it; None where there is nothing yet."""
    try:
        return stat.S_IFMT(os.stat(path).st_mode)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise unwritable(path, getattr(error, "strerror", None) or str(error)) from None


@contextmanager
def _stream(path: Path, kind: int) -> Iterator[TextIO]:
    try:  # a pipe that nobody reads would be waited for
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if kind == stat.S_IFIFO and error.errno == errno.ENXIO:
            works = f"what reads it, started first: cat {shlex.quote(str(path))} &"
            raise unwritable(path, "it is a pipe, and nobody reads it", works) from None
        raise unwritable(path, str(error.strerror)) from None
    os.set_blocking(handle, True)
    with open(handle, "w", encoding="utf-8") as out:
        yield out


@contextmanager
def _lock(path: Path, file: Path) -> Iterator[None]:
    if not file.parent.is_dir():
        raise unwritable(path, "no such folder", "--output in a folder that is there", given=str(file.parent))
    if file.exists() and not os.access(file, os.R_OK | os.W_OK):
        raise unwritable(path, "it is not readable and writable")
    lock = file.with_name(f".{file.name}.lock")
    try:
        held = _locked(lock)
    except BlockingIOError:
        raise unwritable(path, "another run is writing it") from None
    except OSError as error:
        raise unwritable(path, f"no file can be made beside it, {lock}: {error.strerror}") from None
    with held:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _locked(path: Path) -> BinaryIO:
    """A file whose lock nobody else has, nor will have while it is open; raises BlockingIOError or OSError."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # who had it may just have removed it, and another have made one
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise BlockingIOError
    except OSError:
        file.close()
        raise
    return file
