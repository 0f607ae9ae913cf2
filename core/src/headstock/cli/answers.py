"""The answers of a run on their way out: streamed as text, or a JSON line each that says what it was made with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstock.cli.destination import occupied, unwritable
from headstock.cli.output import Lines, Place
from headstock.cli.prompts import Prompt
from headstock.cli.settings import Settings
from headstock.cli.tables import DOCUMENT_VERSION
from headstock.errors import HeadstockError

if TYPE_CHECKING:
    from headstock.engine.engine import Output
    from headstock.engine.request import Completion

TELLING = ("dtype", "kv_dtype", "max_context")  # the choices that change a text; others change speed and rounding alone
KEYS = {"version", "index", "text", "finish_reason", "error", "prompt_tokens", "tokens", "options"}
BEGINNING = f'{{"version": {DOCUMENT_VERSION}, "index": '.encode()


class Answers:
    """Where answers go: a JSON line each to `lines`, or streamed as text where there are none.

    `made_with` are the options of the run. `before` is called once, ahead of the first answer: what is refused until
    then is refused without another word.
    """

    def __init__(self, lines: Lines | None, made_with: Mapping[str, Any], before: Callable[[], None]):
        self.lines, self.made_with, self.before = lines, made_with, before
        self.begun, self.done = False, 0
        self.failed: list[tuple[str, str]] = []

    def take(self, prompt: Prompt, output: Output) -> None:
        """Passes on what a step brought a prompt."""
        if not self.begun:
            self.begun = True
            self.before()
        if self.lines is None:
            print(output.text, end="", flush=True)
        if output.completion is not None:
            self._end(prompt, output.completion)

    def _end(self, prompt: Prompt, completion: Completion) -> None:
        self.done += 1
        if completion.error:
            self.failed.append((prompt.where, completion.error))
        if self.lines is None:
            print(flush=True)
        else:
            document = answer(prompt, completion, self.made_with)
            self.lines.write(prompt.number, json.dumps(document, ensure_ascii=False))


def made_with(settings: Settings, raw: bool) -> dict[str, Any]:
    """What the answers of a run depend on besides each prompt's own sampling; defaults are left out."""
    choices = settings.choices.model_dump(mode="json", exclude_defaults=True, include=set(TELLING))
    model = settings.choices.model
    return {
        "model": "embedded" if model is None else os.path.realpath(model),
        **({"raw": True} if raw else {}),
        **choices,
    }


def answer(prompt: Prompt, completion: Completion, made_with: Mapping[str, Any]) -> dict[str, Any]:
    """The document of one answer."""
    return {
        "version": DOCUMENT_VERSION,
        "index": prompt.number,
        prompt.kind: prompt.content,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "error": completion.error or None,
        "prompt_tokens": completion.prompt_tokens,
        "tokens": len(completion.tokens),
        "options": _options(prompt, made_with),
    }


def answered(output: Path, prompts: Sequence[Prompt], made_with: Mapping[str, Any]) -> dict[int, Place]:
    """Where the answers of an earlier run lie in its output, by prompt; a torn last line is none, nor is an error.

    Raises HeadstockError, naming the line, for anything else that is not an answer to these prompts with these options.
    """
    places = {}
    for where, place, document in written(output):
        _check(document, where, prompts, made_with)
        if not document.get("error"):
            places[document["index"]] = place
    return places


def written(output: Path) -> Iterator[tuple[str, Place, dict[str, Any]]]:
    """The answers in a file: which line each is, where it lies, and its document; a torn last line is passed over.

    Raises HeadstockError, naming the line, for what this program did not write: it is somebody's, and would be lost.
    """
    if not output.exists():
        return
    start, ours = 0, False
    try:
        with output.open("rb") as file:
            for number, line in enumerate(file, start=1):
                document = _document(line)
                if document is not None:
                    ours = True
                    yield f"{output}:{number}", Place(start, len(line.removesuffix(b"\n"))), document
                elif line.strip() and not _torn(line, ours):
                    raise occupied(output, number, line)
                start += len(line)
    except OSError as error:
        raise unwritable(output, f"what it holds cannot be read: {error.strerror}") from None


def _document(line: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):  # of the encoding, the syntax, or what nobody writes
        return None
    ours = isinstance(document, dict) and document.keys() >= KEYS and document["version"] == DOCUMENT_VERSION
    return document if ours and type(document["index"]) is int else None


def _torn(line: bytes, ours: bool) -> bool:
    """Whether a line was cut while it was written: the last one, after others of ours or as these begin."""
    return not line.endswith(b"\n") and (ours or line.startswith(BEGINNING) or BEGINNING.startswith(line))


def _check(document: dict[str, Any], where: str, prompts: Sequence[Prompt], made_with: Mapping[str, Any]) -> None:
    index, works = document["index"], "--output with another file, or no --resume"
    if not (0 <= index < len(prompts) and document.get(prompts[index].kind) == prompts[index].content):
        raise HeadstockError(f"{where} answers another prompt than is given now", works=works)
    was, now = document.get("options") or {}, _options(prompts[index], made_with)
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) != now.get(key):
            given = f"{key} {now.get(key, 'by default')}, there {was.get(key, 'by default')}"
            raise HeadstockError(f"{where} was made with other options", given=given, works=works)


def _options(prompt: Prompt, made_with: Mapping[str, Any]) -> dict[str, Any]:
    return {**made_with, **prompt.params.model_dump(mode="json", exclude_defaults=True)}
