"""The detokeniser: text from tokens as they come, whole characters only, ending before a stop string."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from headstock.errors import ModelError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """The text of one request, streamed: `push` each token, `finish` at the end, show whatever they return.

    What was returned so far is always a prefix of the final text, which is `pieces.text(tokens)` cut before the
    first stop string (see StopStrings). A token costs the same however long the text has become.
    """

    def __init__(self, pieces: Pieces, stop: Sequence[str] = ()):
        self._pieces = pieces
        self._lead = pieces.lead
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = StopStrings(stop)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None while there is none; later tokens add nothing."""
        return self._stop.found

    def push(self, token: int) -> str:
        """The text that `token` makes certain, often none: the rest waits for its bytes, or may begin a stop string."""
        return self._release(self._characters.decode(self._pieces[token]))

    def finish(self) -> str:
        """What was still held back; bytes that never became a character are U+FFFD."""
        return self._release(self._characters.decode(b"", final=True)) + self._stop.flush()

    def _release(self, text: str) -> str:
        if self._lead and text:
            spaces = min(self._lead, len(text) - len(text.lstrip(" ")))
            self._lead = self._lead - spaces if spaces == len(text) else 0
            text = text[spaces:]
        return self._stop.push(text)


class StopStrings:
    """A search for the first of several strings in a text that comes in parts, whatever the parts.

    First is the one complete after the fewest characters, and the longest of those complete at once. It is found
    as if the text came character by character, so the result does not depend on how tokens divide the text.
    """

    def __init__(self, stop: Sequence[str]):
        assert all(stop), "a stop string has at least one character"
        self.found: str | None = None
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> str:
        """The part of the text so far, not yet returned, that no stop string can begin in."""
        if not self._stop:
            return text
        if self.found is not None or not text:
            return ""
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            _, keep, self.found = min(matches)
            self._held = ""
        else:
            keep = len(text) - self._open(text)
            self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        text, self._held = self._held, ""
        return text

    def _open(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        lengths = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(lengths, default=0)


class Pieces(dict[int, bytes]):
    """The UTF-8 bytes that each token adds to a text: `pieces[token]`, worked out on first use and kept.

    A text is the bytes of its tokens, decoded with one U+FFFD for each maximal invalid part (the Unicode Standard,
    section 3.9), less up to `lead` leading spaces. That is what the `tokenizers` library decodes, except that a run
    of byte-fallback tokens keeps its valid characters when another part of the run is invalid, as in SentencePiece:
    the library turns the whole run into U+FFFD, characters already streamed included. Special tokens, and ids
    outside the vocabulary, add nothing.

    Raises ModelError for a decoder that is neither byte-level nor SentencePiece's, with or without byte fallback.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        super().__init__()
        self.lead = 0
        self._tokenizer = tokenizer
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._byte_level: dict[str, int] = {}
        self._byte_fallback = False
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
        for step in _decoder_steps(decoder):
            match step:
                case {"type": "ByteLevel"}:
                    self._byte_level = _byte_level_alphabet()
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}:
                    self.lead = 0 if scheme == "never" else 1
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                    self.lead = start
                case {"type": "Fuse"} | {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                    pass
                case _:
                    raise ModelError(
                        "tokenizer.json has a decoder that is not supported",
                        given=json.dumps(step, ensure_ascii=False),
                        works="a byte-level decoder, or SentencePiece's with or without byte fallback",
                    )

    def __missing__(self, token: int) -> bytes:
        text = None if token in self._special else self._tokenizer.id_to_token(token)
        piece = self[token] = b"" if text is None else self._bytes(text)
        return piece

    def text(self, tokens: Iterable[int]) -> str:
        """The text of a whole sequence of tokens."""
        stream = Detokenizer(self)
        return "".join(map(stream.push, tokens)) + stream.finish()

    def _bytes(self, text: str) -> bytes:
        if self._byte_level:  # an added token may hold characters outside the alphabet: it is plain text
            inside = self._byte_level.keys() >= set(text)
            return bytes(self._byte_level[character] for character in text) if inside else text.encode()
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(byte[1])
        return text.replace("▁", " ").encode()


def _decoder_steps(decoder: Any) -> list[Any]:
    """The decoder's steps as tokenizer.json writes them, sequences unpacked."""
    if decoder is not None and decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]


def _byte_level_alphabet() -> dict[str, int]:
    """The bytes by the characters that write them in byte-level vocabularies, as GPT-2 defined them.

    A printable Latin-1 character writes its own byte; the other bytes, in order, are written from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
