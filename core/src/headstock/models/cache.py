"""The cache of converted models: complete folders under names of their own, written aside first. Torch-free."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headstock.errors import ModelError

UNFINISHED = ".unfinished-"
SIZES = "headstock.json"  # the size in bytes of every other file of a complete folder
ABANDONED = 3600.0  # seconds after which an unfinished folder that nobody has locked belongs to a process that is gone


def default_cache_dir() -> Path:
    """The folder for converted models: `headstock` in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "headstock"


def is_complete(folder: Path) -> bool:
    """Whether a folder was published and still has all its files, in full."""
    try:
        sizes = json.loads((folder / SIZES).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def size_of(cache: Path) -> tuple[int, int]:
    """The number of models in a cache, and the bytes of all its files."""
    files = [Path(folder, name) for folder, _, names in os.walk(cache) for name in names]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return sum(file.name == SIZES and file.parent.parent == cache for file in files), sum(sizes)


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A folder to write in, which takes the place of `folder` when all went well, and is gone when not.

    Several processes may write one at once: the first to be complete is kept. What killed processes left is removed.
    Raises ModelError where the cache cannot be written.
    """
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{folder.name}-", dir=cache))
        try:
            with _locked(unfinished):
                yield unfinished
                _publish(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        works, cure = "a folder that can be written, with room for the model", "XDG_CACHE_HOME=FOLDER headstock …"
        raise ModelError(f"cannot write the cache {cache}: {error.strerror or error}", works=works, type=cure) from None


def _publish(unfinished: Path, folder: Path) -> None:
    """Renames it, after the bytes are on disk; where another process was first, its folder is as good."""
    sizes = {file.name: file.stat().st_size for file in unfinished.iterdir()}
    (unfinished / SIZES).write_text(json.dumps(sizes, indent=2), encoding="utf-8")
    for file in unfinished.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())
    if folder.exists() and not is_complete(folder):
        shutil.rmtree(folder)
    try:
        unfinished.rename(folder)
    except OSError:
        if not is_complete(folder):
            raise


def _sweep(cache: Path) -> None:
    for folder in cache.glob(f"{UNFINISHED}*"):
        with suppress(OSError):  # where another process is at it too
            if time.time() - folder.stat().st_mtime > ABANDONED:
                with _locked(folder) as alone:
                    if alone:
                        shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether this process has the lock of a folder, which ends with the process. Some file systems have none."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(handle)
