"""The cache of converted models: whole folders or none, mended where damaged, and clear about what it cannot write."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from headstock.errors import ModelError
from headstock.models.cache import ABANDONED, is_complete, size_of, writing


def publish(folder, content=b"weights"):
    with writing(folder) as unfinished:
        (unfinished / "model").write_bytes(content)
        (unfinished / "config.json").write_bytes(b"{}")


def test_a_folder_is_complete_once_published_and_no_longer_when_a_part_is_lost(tmp_path):
    folder = tmp_path / "cache" / "model"
    assert not is_complete(folder)
    publish(folder)
    assert is_complete(folder)
    assert size_of(folder.parent) == (1, sum(file.stat().st_size for file in folder.iterdir()))
    for damage in (
        lambda file: file.unlink(), lambda file: file.write_bytes(b""), lambda file: file.write_bytes(b"weight"),
    ):  # fmt: skip
        for name in ("model", "config.json", "headstock.json"):
            damage(folder / name)
            assert not is_complete(folder)
            publish(folder)
            assert is_complete(folder)
            assert (folder / "model").read_bytes() == b"weights"


def test_what_fails_leaves_neither_folder(tmp_path):
    def stop():
        with writing(tmp_path / "model") as unfinished:
            (unfinished / "model").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_the_first_to_end_is_kept(tmp_path):
    with writing(tmp_path / "model") as slow:
        (slow / "model").write_bytes(b"slow")
        publish(tmp_path / "model", b"fast")
    assert (tmp_path / "model" / "model").read_bytes() == b"fast"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    old, dead, fresh, other = (tmp_path / name for name in ("x", ".unfinished-a-1", ".unfinished-b-2", ".other-c-3"))
    long_ago = time.time() - ABANDONED - 60
    for folder in (dead, fresh, other):
        folder.mkdir()
        (folder / "half").touch()
    for folder in (dead, other):
        os.utime(folder, (long_ago, long_ago))
    with writing(old) as living:
        os.utime(living, (long_ago, long_ago))
        publish(tmp_path / "model")
        assert living.exists()
    assert not dead.exists()
    assert fresh.exists()
    assert other.exists()
    assert is_complete(old)


@pytest.mark.parametrize("place", ["/dev/null", "/proc/nope", "/proc/nope/deeper"])
def test_a_cache_that_cannot_be_written_is_refused_with_the_cure(place):
    with pytest.raises(ModelError, match=r"cannot write the cache .*XDG_CACHE_HOME=FOLDER") as caught:
        publish(Path(place, "headstock", "model"))
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_told_as_such_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands in for a full disk: the system refuses the write in the same place."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ModelError, match="cannot write the cache"):
            publish(tmp_path / "model", bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
