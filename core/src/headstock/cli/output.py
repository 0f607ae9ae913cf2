"""Where the JSON lines of a run go: a stream, or a file that an interrupted run goes on with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TextIO


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
    already, the lines at `places` stay and the rest goes. The path is of the file itself: a link would be replaced.
    """

    def __init__(self, path: Path, file: BinaryIO, places: Mapping[int, Place]):
        self.path, self.file, self.places = path, file, dict(places)

    @classmethod
    @contextmanager
    def opened(cls, path: Path, places: Mapping[int, Place]) -> Iterator[OutputFile]:
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
