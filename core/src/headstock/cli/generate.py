"""`headstock generate`: prompts in, text out, through the backends that negotiation chooses."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstock.cli.answers import Answers, opened
from headstock.cli.hardware import Hardware
from headstock.cli.options import Choices, Limits, takes
from headstock.cli.prompts import Prompt, read_prompts
from headstock.cli.question import question
from headstock.cli.settings import Settings
from headstock.cli.summary import tell_choice, tell_speed
from headstock.cli.tables import note, progress
from headstock.decision import Decision
from headstock.engine.sampling import SamplingParams
from headstock.errors import HeadstockError
from headstock.negotiate import negotiate
from headstock.offer import Candidate
from headstock.plugins import discover
from headstock.render import raise_unsolved

if TYPE_CHECKING:
    from headstock.engine.generate import Timing
    from headstock.engine.request import Completion
    from headstock.engine.tokenizer import Tokenizer
    from headstock.runner.runner import ModelRunner

Text = Annotated[str | None, typer.Argument(metavar="PROMPT", help="the prompt; - reads it from standard input")]
File = Annotated[
    Path | None, typer.Option(metavar="PATH", help="JSONL: a prompt or messages per line, with sampling of their own")
]
Output = Annotated[
    Path | None, typer.Option(metavar="PATH", help="write a JSON line per prompt to this file, not to standard output")
]
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
    ids = [_encode(tokenizer, each, raw) for each in prompts]
    with opened(output) as out:
        answers = Answers(out, prompts, as_json, lambda: None if quiet else tell_choice(settings, runner))
        completions, timing = _run(runner, tokenizer, ids, answers, bar=as_json and not quiet and sys.stderr.isatty())
    if not quiet:
        tell_speed(timing)
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
    from headstock.models.folder import model_folder
    from headstock.runner.runner import ModelRunner

    dtype: Any = needs[0].dtype
    with progress(shown) as report:
        folder = model_folder(choices.model, dtype, progress=report)
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
    """Backends' own settings under their own names: unknown backends are refused, those not chosen are told."""
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


def _run(
    runner: ModelRunner, tokenizer: Tokenizer, ids: list[list[int]], answers: Answers, bar: bool
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
