"""Streamed text against the `tokenizers` library's decoding of the whole, and stop strings against brute force."""

from __future__ import annotations

from itertools import chain

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from headstock.engine.detokenizer import Detokenizer, Pieces, StopStrings
from headstock.errors import ModelError

CORPUS = ["the quick brown fox, naïve café — 東京の天気 🙂🙃 Привет мир"] * 3
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("｜輔｜", special=False)])
    return tokenizer


def byte_fallback(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    """A SentencePiece-like vocabulary: bytes, then pieces with ▁ for a space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "a", "b", "ab", "▁a▁b", "é", "東京", "DEF", "G", "HI", "J", "🙂"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoder
    return tokenizer


BYTE_LEVEL = byte_level()
FALLBACK = byte_fallback(decoders.Sequence(LLAMA))
GEMMA = byte_fallback(decoders.Sequence(LLAMA[:3]))
TWO_SPACES = byte_fallback(decoders.Sequence([*LLAMA[:3], decoders.Strip(" ", 2, 0)]))


def stream(tokenizer: tokenizers.Tokenizer, tokens: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(Pieces(tokenizer), stop)
    return [*map(detokenizer.push, tokens), detokenizer.finish()]


def ids(tokenizer: tokenizers.Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random tokens: bytes that form no character, special and added tokens, and ids outside the vocabulary."""
    size = tokenizer.get_vocab_size()
    return st.lists(st.integers(0, size + 1) | st.integers(size - 2, size - 1), max_size=40)


@given(ids(BYTE_LEVEL))
def test_a_byte_level_stream_is_the_whole_decoded(tokens):
    assert "".join(stream(BYTE_LEVEL, tokens)) == BYTE_LEVEL.decode(tokens)


@pytest.mark.parametrize("tokenizer", [FALLBACK, GEMMA, TWO_SPACES], ids=["llama", "gemma", "two spaces"])
@given(data=st.data())
def test_a_byte_fallback_stream_is_the_whole_decoded(tokenizer, data):
    characters = st.characters(exclude_categories=["Cs"]).map(lambda c: [3 + byte for byte in c.encode()])
    pieces = st.integers(3 + 256, tokenizer.get_vocab_size() - 1).map(lambda t: [t])
    runs = data.draw(st.lists(characters | pieces | st.sampled_from([[0], [1], [2], [259], [260]]), max_size=20))
    tokens = list(chain.from_iterable(runs))
    assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens)


@given(ids(FALLBACK))
@example([3 + 0x61, 3 + 0xE6, 3 + 0x9D, 3 + 0x62])
def test_invalid_bytes_leave_the_valid_characters_beside_them(tokens):
    """Where the library decodes a run of byte tokens, so do we; where it gives the run up, its valid part stays."""
    data = b"".join(
        bytes([t - 3]) if t < 3 + 256 else (FALLBACK.id_to_token(t) or "").replace("▁", " ").encode()
        for t in tokens
        if t > 2
    )
    expected = data.decode("utf-8", "replace").removeprefix(" ")
    assert "".join(stream(FALLBACK, tokens)) == expected
    if "�" not in expected:
        assert expected == FALLBACK.decode(tokens)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_metaspace_gives_back_the_text_it_encoded(text):
    """But for one leading space, which Metaspace itself drops."""
    tokenizer = byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    text = text.replace("▁", "_")
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(stream(tokenizer, tokens)) == text.removeprefix(" ")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, FALLBACK], ids=["byte level", "byte fallback"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_every_character_comes_whole_and_at_once(tokenizer, text):
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    pieces, shown, data = Pieces(tokenizer), "", b""
    detokenizer = Detokenizer(pieces)
    for token in tokens:
        shown += detokenizer.push(token)
        data += pieces[token]
        whole = data.decode("utf-8", "ignore")
        assert shown == (whole.removeprefix(" ") if pieces.lead else whole)


def test_a_character_of_four_tokens_comes_with_the_last():
    tokens = [3 + byte for byte in "🙂".encode()]
    assert stream(FALLBACK, tokens) == ["", "", "", "🙂", ""]
    assert stream(FALLBACK, tokens[:3]) == ["", "", "", "�"]  # cut short by the token limit


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]),
    ],
    ids=str,
)
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder):
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ModelError, match="decoder") as refusal:
        Pieces(tokenizer)
    assert "\n" not in str(refusal.value)


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Brute force: read character by character; the first string complete ends the text, the longest if several."""
    for end in range(len(text) + 1):
        for found in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(found):
                return text[: end - len(found)], found
    return text, None


LETTERS = st.text("ab", max_size=12)


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
@example(["abc"], ["abcd", "bc"])
@example(["x\nEN", "D"], ["END", "\nEND"])
def test_stop_strings_match_brute_force_however_the_text_is_cut(parts, stop):
    search, text, shown = StopStrings(stop), "", ""
    for part in parts:
        shown += search.push(part)
        text += part
        cut, found = first_stop(text, stop)
        open_end = max((n for s in stop for n in range(len(s)) if cut.endswith(s[:n])), default=0)
        assert (shown, search.found) == (cut if found else cut[: len(cut) - open_end], found)
    assert (shown + search.flush(), search.found) == first_stop(text, stop)
    assert search.flush() == ""


def test_no_part_of_a_stop_string_is_shown():
    tokens = [FALLBACK.token_to_id(piece) for piece in ("ab", "DEF", "G", "HI", "J", "b")]
    assert stream(FALLBACK, tokens, ("DEFGHIJ",)) == ["ab", "", "", "", "", "", ""]
    assert stream(FALLBACK, [*tokens[:4], tokens[0]], ("DEFGHIJ",)) == ["ab", "", "", "", "DEFGHIab", ""]
    assert stream(FALLBACK, tokens[:4], ("DEFGHIJ",)) == ["ab", "", "", "", "DEFGHI"]


def test_a_stop_string_is_found_across_byte_tokens_and_at_the_very_end():
    detokenizer = Detokenizer(Pieces(FALLBACK), ("🙂b", "�"))
    smile = [3 + byte for byte in "🙂".encode()]
    assert "".join(map(detokenizer.push, [*smile, *smile])) == "🙂"
    assert detokenizer.stopped_by is None
    assert detokenizer.push(FALLBACK.token_to_id("b")) == ""
    assert detokenizer.stopped_by == "🙂b"
    assert detokenizer.push(FALLBACK.token_to_id("a")) + detokenizer.finish() == ""
    cut_short = Detokenizer(Pieces(FALLBACK), ("�",))
    assert cut_short.push(smile[0]) + cut_short.finish() == ""
    assert cut_short.stopped_by == "�"
