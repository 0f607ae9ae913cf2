"""`headstock generate`: prompts in, text out, through the backends that negotiation chooses."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstock.cli.answers import Answers, answered, made_with
from headstock.cli.hardware import Hardware
from headstock.cli.options import Choices, Limits, takes
from headstock.cli.output import Lines, OrderedStream, Place, check_output, claimed, opened
from headstock.cli.prompts import Prompt, encode, read_prompts
from headstock.cli.question import model_config, question
from headstock.cli.settings import Settings
from headstock.cli.summary import describe, tell_choice, tell_notices, tell_speed
from headstock.cli.tables import note, progress
from headstock.engine.sampling import SamplingParams
from headstock.errors import HeadstockError, PluginError
from headstock.negotiate import negotiate
from headstock.plugins import describe_fault, installed
from headstock.prints import stdout_to_stderr
from headstock.render import raise_unsolved

if TYPE_CHECKING:
    from headstock.engine.engine import Engine
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
Resume = Annotated[
    bool, typer.Option("--resume", help="go on where a run with this --output was interrupted, if there was one")
]
Raw = Annotated[bool, typer.Option("--raw", help="continue the text; by default the model answers it, if it can chat")]
Quiet = Annotated[bool, typer.Option("--quiet", help="nothing but the text")]


@takes(Choices, Limits, SamplingParams)
def generate(
    settings: Settings,
    prompt: Text = None,
    prompt_file: File = None,
    raw: Raw = False,
    output: Output = None,
    resume: Resume = False,
    json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """Generates text with a model.

    Streams the answer to standard output; which backend runs, and how fast, goes to standard error.
    """
    prompts = read_prompts(prompt, prompt_file, settings.sampling)
    check_output(output, prompt_file)
    with claimed(output):
        _generate(settings, prompts, output, raw, resume, json or output is not None or prompt_file is not None, quiet)


def _generate(
    settings: Settings, prompts: list[Prompt], output: Path | None, raw: bool, resume: bool, as_json: bool, quiet: bool
) -> None:
    """Answers what is not answered yet."""
    options = made_with(settings, raw)
    places = _places(output, prompts, options) if resume else {}
    prompts = [each for each in prompts if each.number not in places]
    if places and not quiet:
        note(f"{output} has {len(places)} answers already, {len(prompts)} are to come")
    if output is not None and not prompts:
        with opened(output, places):
            return  # all of it whole lines, and in order
    shown = not quiet and sys.stderr.isatty()
    runner, tokenizer, ids = _load(settings, prompts, raw, shown)
    told = len(runner.notices)

    def before() -> None:
        if not quiet:
            tell_choice(settings, runner)
            tell_notices(runner.notices[:told])

    from headstock.engine.engine import Engine

    with Engine(runner, tokenizer) as engine, _interruptible() as interrupted:
        asked = {
            engine.add_request(own, prompt.params, called=prompt.where): prompt
            for prompt, own in zip(prompts, ids, strict=True)
        }
        with _lines(output, places, as_json) as lines:  # nothing is refused any more
            answers = Answers(lines, options, before)
            _run(engine, asked, answers, interrupted, bar=as_json and shown)
        stats = engine.stats
    if not quiet:
        tell_speed(stats)
        tell_notices(runner.notices[told:])
    for where, error in answers.failed:
        note(f"headstock: {where}: {error}")
    if answers.done < len(prompts):
        if not as_json:
            print()
        more = "; to go on, give the same command --resume" if output is not None else ""
        note(f"headstock: interrupted, {answers.done} of {len(prompts)} prompts answered{more}")
        raise typer.Exit(128 + interrupted())
    if answers.failed:
        raise typer.Exit(1)


def _places(output: Path | None, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> dict[int, Place]:
    if output is None:
        raise HeadstockError("--resume goes on with a file", works="--output FILE")
    return answered(output, prompts, options)


def _lines(output: Path | None, places: Mapping[int, Place], as_json: bool) -> AbstractContextManager[Lines | None]:
    if output is not None:
        return opened(output, places)
    return OrderedStream(sys.stdout) if as_json else nullcontext()


def _load(
    settings: Settings, prompts: Sequence[Prompt], raw: bool, shown: bool
) -> tuple[ModelRunner, Tokenizer, list[list[int]]]:
    """The runner, its tokenizer and the prompts in its tokens.

    What can be refused without torch is refused before torch is imported, and a prompt before weights are read.
    """
    choices, limits = settings.choices, settings.limits
    needs, policy = question(settings, Hardware.here(choices.device))
    plugins = installed()
    candidates = [candidate for plugin in plugins for candidate in plugin.candidates()]
    decision = negotiate(needs, candidates, policy)
    if not decision.solved:
        raise_unsolved(decision)

    from headstock.engine.tokenizer import Tokenizer
    from headstock.models.folder import model_folder
    from headstock.runner.runner import ModelRunner

    dtype: Any = needs[0].dtype
    with stdout_to_stderr(), progress(shown) as report:
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
            mixed=limits.mixed,
            graph_sizes=limits.graph_sizes,
            progress=report,
        )
    return runner, tokenizer, ids


def _run(
    engine: Engine, asked: Mapping[int, Prompt], answers: Answers, interrupted: Callable[[], int], bar: bool
) -> None:
    """Serves all prompts together, until each is answered or the user asks for an end."""
    started = time.perf_counter()
    with progress(bar) as report:
        try:
            while engine.busy and not interrupted():
                with stdout_to_stderr():
                    outputs = engine.step()
                for output in outputs:
                    answers.take(asked[output.request], output)
                if report:
                    said = describe(engine.stats, time.perf_counter() - started)
                    report("generating", answers.done, len(asked), said)
        except (Exception, SystemExit) as error:
            if isinstance(error, HeadstockError) or not hasattr(error, "__notes__"):
                raise
            what = f"{error.__notes__[-1]}: {describe_fault(error).what}"  # the runner notes whose it is
            raise PluginError(what, works="another backend", type="headstock doctor") from error


@contextmanager
def _interruptible() -> Iterator[Callable[[], int]]:
    """Tells which signal asked for an end, or 0, so that a step comes to its own: Ctrl-C, or a kind kill.

    The second Ctrl-C interrupts at once.
    """
    heard = 0

    def hear(number: int, _: object) -> None:
        nonlocal heard
        heard = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {each: signal.signal(each, hear) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: heard
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
