"""`headstock generate`: prompts in, text out, through the backends that negotiation chooses."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstock.cli.answers import Answers, check_output, opened
from headstock.cli.hardware import Hardware
from headstock.cli.options import Choices, Limits, takes
from headstock.cli.prompts import Prompt, encode, read_prompts
from headstock.cli.question import model_config, question
from headstock.cli.settings import Settings
from headstock.cli.summary import tell_choice, tell_notices, tell_speed
from headstock.cli.tables import note, progress
from headstock.engine.sampling import SamplingParams
from headstock.errors import HeadstockError, PluginError
from headstock.negotiate import negotiate
from headstock.offer import Candidate
from headstock.plugins import describe_fault, installed
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
    check_output(output)
    as_json = json or output is not None or prompt_file is not None
    runner, tokenizer, ids = _load(settings, prompts, raw, shown=not quiet and sys.stderr.isatty())
    told = len(runner.notices)

    def before() -> None:
        if not quiet:
            tell_choice(settings, runner)
            tell_notices(runner.notices[:told])

    with opened(output) as out:
        answers = Answers(out, prompts, as_json, before)
        completions, timing = _run(runner, tokenizer, ids, answers, bar=as_json and not quiet and sys.stderr.isatty())
    if not quiet:
        tell_speed(timing)
        tell_notices(runner.notices[told:])
    failed = [(each.where, done.error) for each, done in zip(prompts, completions, strict=True) if done.error]
    for where, error in failed:
        note(f"headstock: {where}: {error}")
    if failed:
        raise typer.Exit(1)


def _load(
    settings: Settings, prompts: Sequence[Prompt], raw: bool, shown: bool
) -> tuple[ModelRunner, Tokenizer, list[list[int]]]:
    """The runner, its tokenizer and the prompts in its tokens.

    What can be refused without torch is refused before torch is imported, and a prompt before weights are read.
    """
    choices, limits = settings.choices, settings.limits
    needs, policy = question(choices, Hardware.here(choices.device))
    plugins = installed()
    candidates = [candidate for plugin in plugins for candidate in plugin.candidates()]
    decision = negotiate(needs, candidates, policy)
    if not decision.solved:
        raise_unsolved(decision)
    _check_options(limits.backend_option, candidates)

    from headstock.engine.tokenizer import Tokenizer
    from headstock.models.folder import model_folder
    from headstock.runner.runner import ModelRunner

    dtype: Any = needs[0].dtype
    with progress(shown) as report:
        folder = model_folder(choices.model, dtype, progress=report)
        tokenizer = Tokenizer.from_folder(folder)
        ids = encode(prompts, tokenizer, raw, model_config(folder), needs[0].max_context)
        runner = ModelRunner(
            folder,
            device=choices.device,
            dtype=dtype,
            kv_dtype=choices.kv_dtype,
            max_batch=min(limits.max_batch, len(prompts)),
            max_context=choices.max_context,
            kv_tokens=limits.kv_tokens,
            policy=policy,
            offers=plugins,
            options=limits.backend_option,
            progress=report,
        )
    return runner, tokenizer, ids


def _check_options(given: Iterable[str], candidates: Sequence[Candidate]) -> None:
    """Refuses settings of a backend that nobody offers."""
    for name in given:
        if not any(candidate.answers_to(name) for candidate in candidates):
            names = [candidate.name for candidate in candidates]
            near = get_close_matches(name, names, 1)
            works = f"{near[0]}, perhaps" if near else ", ".join(names)
            raise HeadstockError("--backend-option names an unknown backend", given=name, works=works)


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

        try:
            return generator.generate(ids, params, answers.on_text, on_done), generator.timing
        except (Exception, SystemExit) as error:
            if isinstance(error, HeadstockError) or not hasattr(error, "__notes__"):
                raise
            what = f"{error.__notes__[-1]}: {describe_fault(error).what}"  # the runner notes whose it is
            raise PluginError(what, works="another backend", type="headstock doctor") from error
