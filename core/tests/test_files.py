"""Files that people hand over: read whole and as they are, or refused in one line that names them."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.errors import HeadstockError, ModelError
from headstock.files import parse_json, read_text, read_toml
from headstock.models.config import ModelConfig
from headstock.models.record import read_json
from headstock.models.weights import WeightSource

DEEP = "[" * 100_000 + "]" * 100_000


@given(st.text(), st.booleans())
def test_a_text_is_read_as_it_was_written(tmp_path_factory, text, marked):
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_bytes(text.encode("utf-8-sig" if marked or text.startswith("\ufeff") else "utf-8"))
    assert read_text(path, "a text") == text


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\xed\xa0\x80", None])
def test_what_is_no_text_is_named(tmp_path, content):
    path = tmp_path / "file"
    path.mkdir() if content is None else path.write_bytes(content)
    for place in (path, tmp_path / "absent", path / "under", tmp_path / ("x" * 5000), tmp_path / "nul\0"):
        with pytest.raises(ModelError, match=r"cannot read .*would work: a text") as caught:
            read_text(place, "a text", ModelError)
        assert str(place) in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", '{"a": 1}x', "'a'", DEEP, '{"a":' * 9999, "1" * 9999])
def test_what_is_no_json_is_named_and_what_nests_without_end_too(tmp_path, content):
    with pytest.raises(HeadstockError, match=r"^here is ") as caught:
        parse_json(content, "here", "JSON")
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json is "):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["a", "a = [", f"a = {DEEP}"])
def test_what_is_no_toml_is_named(tmp_path, content):
    path = tmp_path / "file.toml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(HeadstockError, match=r"file\.toml is "):
        read_toml(path)


def test_a_pipe_among_the_files_of_a_model_is_not_waited_for(tmp_path):
    for name in ("config.json", "model.safetensors"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match="no regular file"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        WeightSource(tmp_path)


def test_a_shard_of_any_name_is_refused_by_it(tmp_path):
    index = {"weight_map": {"w": "x" * 5000}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match="xxx is missing"):
        WeightSource(tmp_path)
