"""`headstock generate`: prompts in, text out, through the backends that negotiation chooses."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from headstock.cli.hardware import Hardware
from headstock.cli.options import Choices, Limits, takes
from headstock.cli.prompts import Prompt, read_prompts
from headstock.cli.question import question
from headstock.cli.settings import Settings
from headstock.cli.tables import DOCUMENT_VERSION, note, progress
from headstock.decision import Decision
from headstock.engine.sampling import SamplingParams
from headstock.errors import HeadstockError
from headstock.models.embedded import embedded_model
from headstock.negotiate import negotiate
from headstock.offer import Candidate
from headstock.plugins import discover
from headstock.policy import Policy
from headstock.render import raise_unsolved

if TYPE_CHECKING:
    from headstock.engine.generate import Timing
    from headstock.engine.request import Completion
    from headstock.engine.tokenizer import Tokenizer
    from headstock.runner.runner import ModelRunner

Text = Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="the prompt; - reads it from standard input")]
File = Annotated[Path | None, typer.Option(help="JSONL: a prompt or messages per line, with sampling of their own")]
Output = Annotated[Path | None, typer.Option(help="write a JSON line per prompt to this file, not to standard output")]
AsJSON = Annotated[bool, typer.Option("--json", help="write a JSON line per prompt; --prompt-file does so anyway")]
Raw = Annotated[bool, typer.Option("--raw", help="continue the text; by default the model answers it, if it can chat")]
Quiet = Annotated[bool, typer.Option("--quiet", help="nothing but the text")]


@takes(Choices, Limits, SamplingParams)
def generate(
    settings: Settings,
    prompt: Text = None,
    prompt_file: File = None,
    raw: Raw = False,
    output: Output = None,
    json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Generates text with a model.

    Streams the answer to standard output; which backend runs, and how fast, goes to standard error.
    """
    prompts = read_prompts(prompt, prompt_file, settings.sampling)
    as_json = json or output is not None or prompt_file is not None
    runner, tokenizer = _load(settings, len(prompts), shown=not quiet and sys.stderr.isatty())
    if not quiet:
        _tell_choice(settings, runner)
    ids = [_encode(tokenizer, each, raw) for each in prompts]
    with _opened(output) as out:
        answers = _Answers(out, prompts, as_json)
        completions, timing = _run(runner, tokenizer, ids, answers, bar=as_json and not quiet and sys.stderr.isatty())
    if not quiet:
        _tell_speed(timing)
    failed = [(each.where, done.error) for each, done in zip(prompts, completions, strict=True) if done.error]
    for where, error in failed:
        note(f"headstock: {where}: {error}")
    if failed:
        raise typer.Exit(1)


def _load(settings: Settings, num_prompts: int, shown: bool) -> tuple[ModelRunner, Tokenizer]:
    """The runner and its tokenizer. What can be refused without torch is refused before it is imported."""
    choices, limits = settings.choices, settings.limits
    needs, policy = question(choices, Hardware.here(choices.device))
    candidates = discover()
    decision = negotiate(needs, candidates, policy)
    if not decision.solved:
        raise_unsolved(decision)
    options = _options(limits.backend_option, candidates, decision)

    from headstock.engine.tokenizer import Tokenizer
    from headstock.models.gguf import convert, default_cache_dir
    from headstock.runner.runner import ModelRunner

    dtype: Any = needs[0].dtype
    model = choices.model or embedded_model()
    with progress(shown) as report:
        folder = convert(model, default_cache_dir(), dtype, report) if model.suffix == ".gguf" else model
        tokenizer = Tokenizer.from_folder(folder)
        runner = ModelRunner(
            folder,
            device=choices.device,
            dtype=dtype,
            kv_dtype=choices.kv_dtype,
            max_batch=min(limits.max_batch, num_prompts),
            max_context=choices.max_context,
            kv_tokens=limits.kv_tokens,
            policy=policy,
            options=options,
            progress=report,
        )
    return runner, tokenizer


def _options(
    given: Mapping[str, Mapping[str, Any]], candidates: Sequence[Candidate], decision: Decision
) -> dict[str, Mapping[str, Any]]:
    """Backends' own settings under their own names; refuses those of unknown backends and tells of those left unused."""
    chosen = {winner.backend for choice in decision.choices for winner in choice.winners}
    options = {}
    for name, values in given.items():
        found = next((candidate.name for candidate in candidates if candidate.answers_to(name)), None)
        if found is None:
            names = [candidate.name for candidate in candidates]
            near = get_close_matches(name, names, 1)
            works = f"{near[0]}, perhaps" if near else ", ".join(names)
            raise HeadstockError("--backend-option names an unknown backend", given=name, works=works)
        if found not in chosen:
            note(f"headstock: the options of {found} are not used: another backend was chosen")
        options[found] = values
    return options


def _encode(tokenizer: Tokenizer, prompt: Prompt, raw: bool) -> list[int]:
    """The token ids of a prompt: as a chat where the model has a template, as it stands with --raw."""
    if isinstance(prompt.content, list):
        if raw:
            raise HeadstockError(f"{prompt.where} is a chat, which --raw does not write", works="a prompt, or no --raw")
        return tokenizer.encode_chat(prompt.content)
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(prompt.content)
    return tokenizer.encode_chat([{"role": "user", "content": prompt.content}])


class _Answers:
    """Where answers go: streamed as text, or one JSON line each, in the order of the prompts, once all before are out."""

    def __init__(self, out: TextIO, prompts: Sequence[Prompt], as_json: bool):
        self.out, self.prompts, self.as_json = out, prompts, as_json
        self.waiting: dict[int, Completion] = {}
        self.written = self.done = 0

    def on_text(self, index: int, text: str) -> None:
        if not self.as_json:
            print(text, end="", flush=True, file=self.out)

    def on_done(self, index: int, completion: Completion) -> None:
        self.done += 1
        if not self.as_json:
            print(file=self.out, flush=True)
            return
        self.waiting[index] = completion
        while (ready := self.waiting.pop(self.written, None)) is not None:
            print(jsonlib.dumps(self._line(ready), ensure_ascii=False), file=self.out, flush=True)
            self.written += 1

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


def _run(
    runner: ModelRunner, tokenizer: Tokenizer, ids: list[list[int]], answers: _Answers, bar: bool
) -> tuple[list[Completion], Timing]:
    from headstock.engine.generate import Generator

    generator = Generator(runner, tokenizer)
    params = [prompt.params for prompt in answers.prompts]
    with progress(bar) as report:

        def on_done(index: int, completion: Completion) -> None:
            answers.on_done(index, completion)
            if report:
                report("generating", answers.done, len(ids))

        return generator.generate(ids, params, answers.on_text, on_done), generator.timing


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    try:
        file = output.open("w", encoding="utf-8")
    except OSError as error:
        raise HeadstockError(f"cannot write {output}: {error.strerror}", works="--output with another file") from None
    with file:
        yield file


def _tell_choice(settings: Settings, runner: ModelRunner) -> None:
    """Who runs, why, and who asked for it; then what memory goes to, and what else the runner has to say."""
    served: dict[str, list[str]] = {}
    for choice in runner.decision.choices:
        for winner in choice.winners:
            origin = settings.origin(*_fields(runner.decision, settings.choices.policy(), choice.role))
            by = f", by {origin}" if origin else ""
            served.setdefault(f"{winner.backend} ({winner.source}): {winner.why}{by}", []).append(choice.requirement.where)
    for who, roles in served.items():
        note(f"{', '.join(roles)}: {who}")
    cached = {str((c.requirement.page_size, c.requirement.kv_layout)): c.requirement for c in runner.decision.choices}
    note("KV cache: " + "; ".join(f"page size {r.page_size}, {r.kv_layout}, {r.kv_dtype}" for r in cached.values()))
    note("memory: " + ", ".join(" ".join(line.split()) for line in runner.memory.lines()))
    for notice in runner.notices:
        note(f"notice: {notice}")
