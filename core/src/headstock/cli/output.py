"""Where the JSON lines of a run go: a stream, or a file that an interrupted run goes on with."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TextIO

from headstock.errors import HeadstockError


class Lines(Protocol):
    """What takes the lines of a run, each once and by the number of its prompt, in any order."""

    def write(self, index: int, line: str) -> None: ...


class Place(NamedTuple):
    """Where a line lies in a file, in bytes, its line break left out."""

    start: int
    length: int


class OrderedStream:
    """A stream that gets every line in its turn; those that come early wait, at most until it is closed."""

    def __init__(self, out: TextIO):
        self.out, self.early, self.written = out, dict[int, str](), 0

    def write(self, index: int, line: str) -> None:
        self.early[index] = line
        while (ready := self.early.pop(self.written, None)) is not None:
            print(ready, file=self.out, flush=True)
            self.written += 1

    def __enter__(self) -> OrderedStream:
        return self

    def __exit__(self, *exception: object) -> None:
        for _, line in sorted(self.early.items()):
            print(line, file=self.out)


class OutputFile:
    """A file that gets every line at once, and holds them in the order of their prompts when it is closed.

    So a process that is killed leaves all that it finished, and perhaps a torn last line. Of what the file holds
    already, the lines at `places` stay and the rest goes.
    """

    def __init__(self, path: Path, file: BinaryIO, places: Mapping[int, Place]):
        self.path, self.file, self.places = path, file, dict(places)

    @classmethod
    @contextmanager
    def opened(cls, path: Path, places: Mapping[int, Place]) -> Iterator[OutputFile]:
        path = path.resolve()  # what a link points to is replaced, not the link
        if places:
            places = _rewrite(path, places)
        with path.open("ab" if places else "wb") as file:
            output = cls(path, file, places)
            try:
                yield output
            finally:
                file.close()
                if list(output.places) != sorted(output.places):
                    _rewrite(path, output.places)

    def write(self, index: int, line: str) -> None:
        data, start = line.encode(), self.file.tell()
        self.file.write(data + b"\n")
        self.file.flush()
        self.places[index] = Place(start, len(data))  # once it is there: the disk may be full


def _rewrite(path: Path, places: Mapping[int, Place]) -> dict[int, Place]:
    """Leaves in a file the lines at `places` alone, in order; returns where they are then. Never half of them."""
    ordered: dict[int, Place] = {}
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with path.open("rb") as old, whole.open("wb") as new:
            for index, place in sorted(places.items()):
                old.seek(place.start)
                ordered[index] = Place(new.tell(), place.length)
                new.write(old.read(place.length) + b"\n")
        whole.chmod(path.stat().st_mode)
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)
    return ordered


def check_output(output: Path | None, prompts: Path | None = None) -> None:
    """Raises HeadstockError for a file that could not be written or has the `prompts`, and leaves it as it is."""
    if output is None:
        return
    if prompts is not None and output.is_file() and prompts.exists() and output.samefile(prompts):
        raise HeadstockError(f"{output} is the file of the prompts", works="--output with another file")
    target = output if output.exists() else output.parent
    if output.is_file() and not os.access(output.resolve().parent, os.W_OK):
        reason = "its folder is not writable, where the lines are put in order"
        raise HeadstockError(f"cannot write {output}: {reason}", works="--output with another file")
    if output.is_dir() or not os.access(target, os.W_OK):
        reason = "it is a folder" if output.is_dir() else "it is not writable" if target.exists() else "no such folder"
        raise HeadstockError(f"cannot write {output}: {reason}", works="--output with another file")


@contextmanager
def claimed(output: Path | None) -> Iterator[None]:
    """Keeps other runs from writing the same file meanwhile; raises HeadstockError where one is at it.

    The lock is on a file beside it, and ends with the process, however that ends. What is no ordinary file is shared.
    """
    if output is None or (output.exists() and not output.is_file()):
        yield
        return
    path = output.resolve()
    lock = path.with_name(f".{path.name}.lock")
    try:
        held = _locked(lock)
    except OSError as error:
        busy = isinstance(error, BlockingIOError | FileNotFoundError)
        reason = "another run is writing it" if busy else f"it cannot be locked: {error.strerror}"
        raise HeadstockError(f"cannot write {output}: {reason}", works="--output with another file") from None
    with held:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _locked(path: Path) -> BinaryIO:
    """A file whose lock nobody else has, nor will have while it is open; raises OSError."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise BlockingIOError  # who had it has just removed it, and another has made one
    except OSError:
        file.close()
        raise
    return file


def opened(output: Path, places: Mapping[int, Place]) -> AbstractContextManager[Lines]:
    """The file to write lines to; one that is no ordinary file, such as a pipe, gets them in their turn."""
    return _stream(output) if output.exists() and not output.is_file() else OutputFile.opened(output, places)


@contextmanager
def _stream(output: Path) -> Iterator[Lines]:
    with output.open("w", encoding="utf-8") as out, OrderedStream(out) as lines:
        yield lines
