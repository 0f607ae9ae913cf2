"""The answers of a run on their way out: streamed as text, or a JSON line each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from headstock.cli.prompts import Prompt
from headstock.cli.tables import DOCUMENT_VERSION
from headstock.errors import HeadstockError

if TYPE_CHECKING:
    from headstock.engine.request import Completion


class Answers:
    """Where answers go: streamed as text, or a JSON line each, in the order of the prompts.

    `before` runs once, ahead of the first answer: what is refused until then is refused without another word.
    """

    def __init__(self, out: TextIO, prompts: Sequence[Prompt], as_json: bool, before: Callable[[], None]):
        self.out, self.prompts, self.as_json, self.before = out, prompts, as_json, before
        self.waiting: dict[int, Completion] = {}
        self.begun, self.written, self.done = False, 0, 0

    def on_text(self, index: int, text: str) -> None:
        self._begin()
        if not self.as_json:
            print(text, end="", flush=True, file=self.out)

    def on_done(self, index: int, completion: Completion) -> None:
        self._begin()
        self.done += 1
        if not self.as_json:
            print(file=self.out, flush=True)
            return
        self.waiting[index] = completion
        while (ready := self.waiting.pop(self.written, None)) is not None:
            print(json.dumps(self._line(ready), ensure_ascii=False), file=self.out, flush=True)
            self.written += 1

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            self.before()

    def _line(self, completion: Completion) -> dict[str, Any]:
        content = self.prompts[self.written].content
        return {
            "version": DOCUMENT_VERSION,
            "index": self.written,
            "messages" if isinstance(content, list) else "prompt": content,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "error": completion.error or None,
            "prompt_tokens": completion.prompt_tokens,
            "tokens": len(completion.tokens),
        }


def check_output(output: Path | None) -> None:
    """Raises HeadstockError where `opened` would, and leaves an earlier file as it is."""
    if output is None:
        return
    target = output if output.exists() else output.parent
    if output.is_dir() or not os.access(target, os.W_OK):
        reason = "it is a folder" if output.is_dir() else "it is not writable" if target.exists() else "no such folder"
        raise HeadstockError(f"cannot write {output}: {reason}", works="--output with another file")


@contextmanager
def opened(output: Path | None) -> Iterator[TextIO]:
    """The file to write answers to, by default standard output; raises HeadstockError where it cannot be opened."""
    if output is None:
        yield sys.stdout
        return
    try:
        file = output.open("w", encoding="utf-8")
    except OSError as error:
        raise HeadstockError(f"cannot write {output}: {error.strerror}", works="--output with another file") from None
    with file:
        yield file
