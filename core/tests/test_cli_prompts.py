"""Prompts as people hand them over: every line is one prompt, whatever editor wrote it, and named where it is none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.cli.prompts import read_prompts
from headstock.engine.sampling import SamplingParams
from headstock.errors import HeadstockError

TEXTS = st.text(min_size=1).filter(str.strip)


@given(st.lists(TEXTS, min_size=1), st.sampled_from(["\n", "\r\n", "\n\n"]), st.booleans(), st.booleans())
def test_a_line_is_what_a_line_feed_ends(tmp_path_factory, texts, end, marked, escaped):
    """JSON may hold U+0085, U+2028 and the like as they are."""
    file = tmp_path_factory.getbasetemp() / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=escaped) for text in texts]
    file.write_bytes(end.join([*lines, ""]).encode("utf-8-sig" if marked else "utf-8"))
    assert [prompt.content for prompt in read_prompts(None, file, SamplingParams())] == texts


def test_a_line_that_nests_without_end_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": ' + "[" * 100_000, encoding="utf-8")
    with pytest.raises(HeadstockError, match=r"prompts\.jsonl:2 is nested too deeply"):
        read_prompts(None, file, SamplingParams())
