"""What `--output` may name: files of answers, which are locked, and streams; everything else is told for what it is."""

from __future__ import annotations

import json
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.cli.answers import written
from headstock.cli.destination import Destination, file_name
from headstock.errors import HeadstockError

ANSWER = {
    "version": 1, "index": 0, "prompt": "one", "text": "é", "finish_reason": "length", "error": None,
    "prompt_tokens": 3, "tokens": 1, "options": {"model": "embedded"},
}  # fmt: skip
LINE = json.dumps(ANSWER, ensure_ascii=False).encode() + b"\n"


def refusal(path) -> str:
    with pytest.raises(HeadstockError) as caught, Destination.claimed(file_name(str(path))):
        pass
    assert caught.value.works
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "cannot write '': it is empty"),
        (".", "it is a folder"),
        ("folder", "it is a folder"),
        ("to-folder", "it is a folder"),
        ("absent/", "it is the name of a folder"),
        ("answers/", "it is the name of a folder"),
        ("absent/.", "it is the name of a folder"),
        ("loop", "cannot write loop: Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
        ("x" * 252, "no file can be made beside it"),
        ("astray", "no such folder; given: "),
        ("absent/x", "cannot write absent/x: no such folder"),
        ("answers/x", "Not a directory"),
        ("/proc/x", "no file can be made beside it, /proc/.x.lock: No such file"),
        ("/proc/version", "cannot write /proc/version: "),
        ("socket", "it is a socket"),
        ("pipe", "it is a pipe, and nobody reads it; would work: what reads it, started first: cat pipe &"),
    ],
)
def test_what_cannot_be_written_is_refused_with_its_cause_and_left_alone(tmp_path, monkeypatch, name, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "answers").write_bytes(LINE)
    for link, target in (("to-folder", "folder"), ("loop", "loop"), ("astray", "absent/out.jsonl")):
        (tmp_path / link).symlink_to(target)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        there = sorted(os.listdir())
        said = refusal(name)
    assert told in said
    assert "another run" not in said
    assert sorted(os.listdir()) == there


def test_a_pipe_that_is_read_gets_every_line_in_its_turn(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with Destination.claimed(tmp_path / "pipe") as output:
        assert os.get_blocking(output.stream.fileno()), "a full pipe is waited for"
        with output.opened({}) as lines:
            lines.write(1, "b")
            lines.write(0, "a")
    assert os.read(reader, 100) == b"a\nb\n"
    os.close(reader)


def test_a_terminal_is_a_stream_and_the_null_device_too():
    ours, theirs = os.openpty()
    for path in (os.ttyname(theirs), "/dev/null"):
        with Destination.claimed(file_name(path)) as output, output.opened({}) as lines:
            lines.write(0, "a")
    assert os.read(ours, 100) == b"a\r\n"
    os.close(ours)
    os.close(theirs)


def test_a_new_file_a_link_to_one_and_one_of_answers_are_taken(tmp_path):
    (tmp_path / "link").symlink_to("new")
    for name in ("link", "new"):
        with Destination.claimed(tmp_path / name) as output, output.opened({}) as lines:
            lines.write(0, name)
        assert (tmp_path / "new").read_text(encoding="utf-8") == f"{name}\n"
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "new"]


@pytest.mark.parametrize("content", [b"", b"\n \n", LINE, LINE * 2, LINE[:-1], LINE + b"\n", LINE + b"\0\0"])
def test_answers_are_known(tmp_path, content):
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    found = list(written(path))
    assert [content[place.start :][: place.length] for _, place, _ in found] == [LINE[:-1]] * content.count(b"one")
    assert all(document == ANSWER for _, _, document in found)


@given(st.integers(0, len(LINE)), st.integers(0, 2))
def test_an_output_that_was_cut_anywhere_is_still_one(tmp_path_factory, end, whole):
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.write_bytes(LINE * whole + LINE[:end])
    assert len(list(written(path))) == whole + (end >= len(LINE) - 1)


@pytest.mark.parametrize(
    ("content", "number"),
    [
        (b"a diary", 1),
        (b"\n\na diary", 3),
        (b"GGUF\3\0\0\0", 1),
        (b"[" * 10**5, 1),
        (b'{"index": 0}', 1),
        (b'{"index": 0, "text": "a data set"}\n', 1),
        (json.dumps(ANSWER | {"version": 2}).encode(), 1),
        (json.dumps(ANSWER | {"index": True}).encode() + b"\n", 1),
        (json.dumps(ANSWER, indent=1).encode(), 1),
        (LINE + b"a note\n" + LINE, 2),
    ],
)
def test_what_somebody_else_wrote_is_known_too(tmp_path, content, number):
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(HeadstockError, match=rf"out\.jsonl:{number} is no answer.*type: --output .*out\.jsonl\.ans"):
        list(written(path))


@pytest.mark.parametrize("key", sorted(ANSWER.keys() - {"prompt"}))
def test_an_answer_has_every_key(tmp_path, key):
    path = tmp_path / "out.jsonl"
    path.write_bytes(json.dumps({name: value for name, value in ANSWER.items() if name != key}).encode() + b"\n")
    with pytest.raises(HeadstockError, match="is no answer"):
        list(written(path))
