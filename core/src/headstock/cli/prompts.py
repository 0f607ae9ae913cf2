"""The prompts of a run: one from the command line or from standard input, or one per line of a JSONL file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headstock.engine.sampling import SamplingParams
from headstock.errors import HeadstockError, RequestError
from headstock.files import parse_json, read_text

if TYPE_CHECKING:
    from headstock.engine.tokenizer import Tokenizer
    from headstock.models.config import ModelConfig

SHAPES = '{"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}'


class Prompt(NamedTuple):
    """One prompt: a text or a chat, with how to sample its answer; `where` is what a refusal calls it.

    `number` is its place among the prompts of a run, from 0.
    """

    content: str | list[dict[str, Any]]
    params: SamplingParams
    where: str
    number: int = 0

    @property
    def kind(self) -> str:
        """The key of the content in documents."""
        return "messages" if isinstance(self.content, list) else "prompt"


def read_prompts(text: str | None, file: Path | None, params: SamplingParams) -> list[Prompt]:
    """The prompts that were given, exactly one way; `params` hold where a line of the file does not say otherwise.

    Raises HeadstockError or RequestError, naming the line, for what is missing, empty or cannot be read.
    """
    if (text is None) == (file is None):
        failed = "there is no prompt" if text is None else "a prompt and --prompt-file are both given"
        raise HeadstockError(failed, works="a prompt, - for standard input, or --prompt-file FILE")
    if file is not None:
        return [prompt._replace(number=number) for number, prompt in enumerate(_read_lines(file, params))]
    where = "standard input" if text == "-" else "the prompt"
    return [Prompt(_checked(_stdin() if text == "-" else text, where), params, where)]


def _read_lines(file: Path, params: SamplingParams) -> Iterator[Prompt]:
    content = read_text(file, "a JSONL file") if str(file) != "-" else _stdin()
    lines = content.split("\n")  # alone: JSON may hold what else ends a line in Unicode
    if not any(line.strip() for line in lines):
        raise HeadstockError(f"{file} holds no prompt", works=f"lines like {SHAPES}")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _read_line(line, f"{file}:{number}", params)


def _read_line(line: str, where: str, params: SamplingParams) -> Prompt:
    """One object: a prompt or messages, and sampling parameters of its own."""
    record = parse_json(line, where, f"a line like {SHAPES}", RequestError)
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise RequestError(f"{where} is neither a prompt nor a chat", given=line[:80], works=SHAPES)
    own = {key: value for key, value in record.items() if key not in ("prompt", "messages")}
    for key in own:
        if key not in SamplingParams.model_fields:
            near = get_close_matches(key, SamplingParams.model_fields, 1)
            works = f"{near[0]}, perhaps" if near else ", ".join(["prompt", "messages", *SamplingParams.model_fields])
            raise RequestError(f"{where}: unknown key", given=key, works=works)
    with _named(where):
        params = SamplingParams(**{**params.model_dump(), **own})
    if "messages" in record:
        return Prompt(_checked_chat(record["messages"], where), params, where)
    return Prompt(_checked(record["prompt"], where), params, where)


def _checked(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise RequestError(f"{where}: the prompt is no text", given=repr(text)[:80], works=SHAPES)
    if not text.strip():
        raise RequestError(f"{where} is empty", works="at least one word")
    return text


def _checked_chat(messages: Any, where: str) -> list[dict[str, Any]]:
    fit = isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)
    if not fit:
        raise RequestError(f"{where}: the messages are no chat", given=repr(messages)[:80], works=SHAPES)
    return list(messages)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Says of which prompt a refusal is."""
    try:
        yield
    except RequestError as error:
        what = f"{where}: {error.what}"
        raise RequestError(what, given=error.given, works=error.works, type=error.type) from error


def _stdin() -> str:
    """All of standard input, as it is: read as text, its line breaks would change, or bytes that are no UTF-8 pass."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HeadstockError("cannot read standard input", given=error, works="text in UTF-8") from None


def encode(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, raw: bool, config: ModelConfig, max_context: int
) -> list[list[int]]:
    """The token ids of each prompt: as a chat where the model has a template, as it stands if `raw`.

    Raises HeadstockError or RequestError, naming the prompt, for one that the model cannot be given.
    """
    ids = []
    for prompt in prompts:
        with _named(prompt.where):
            ids.append(_encode(prompt, tokenizer, raw))
            prompt.params.check_stops(config.vocab_size)
    for prompt, own in zip(prompts, ids, strict=True):
        if not own:
            raise RequestError(f"{prompt.where} holds no token of this model", works="at least one")
        if max(own) >= config.vocab_size:
            works = f"tokens below {config.vocab_size}, a tokenizer that belongs to the model"
            raise RequestError(f"{prompt.where} holds a token outside the vocabulary", given=max(own), works=works)
        if len(own) >= max_context:
            longer = f"--max-context {config.max_context}" if max_context < config.max_context else None
            raise RequestError(
                f"{prompt.where} leaves no room for an answer",
                given=f"{len(own)} tokens in a context of {max_context}",
                works="a shorter prompt" + (", or a longer context" if longer else ""),
                type=longer,
            )
    return ids


def _encode(prompt: Prompt, tokenizer: Tokenizer, raw: bool) -> list[int]:
    if isinstance(prompt.content, list):
        if raw:
            raise HeadstockError(f"{prompt.where} is a chat, which --raw does not write", works="a prompt, or no --raw")
        return tokenizer.encode_chat(prompt.content)
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(prompt.content)
    return tokenizer.encode_chat([{"role": "user", "content": prompt.content}])
