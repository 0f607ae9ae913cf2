"""`headstock generate`: prompts in, text out, through the backends that negotiation chooses."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstock.cli.answers import Answers, answered, made_with, written
from headstock.cli.destination import Destination, file_name, unwritable
from headstock.cli.hardware import Hardware
from headstock.cli.options import Choices, Limits, takes
from headstock.cli.output import Lines, OrderedStream, Place
from headstock.cli.prompts import Prompt, encode, read_prompts
from headstock.cli.question import model_config, question
from headstock.cli.settings import Settings
from headstock.cli.summary import describe, tell_choice, tell_notices, tell_speed
from headstock.cli.tables import note, progress
from headstock.engine.sampling import SamplingParams
from headstock.errors import HeadstockError, StepError
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
    Path | None,
    typer.Option(
        metavar="PATH", parser=file_name, help="write a JSON line per prompt to this file, not to standard output"
    ),
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
    as_json = json or output is not None or prompt_file is not None
    if output and prompt_file and os.path.realpath(output) == os.path.realpath(prompt_file):
        raise unwritable(output, "it is the file of the prompts")
    with Destination.claimed(output) if output else nullcontext() as destination:
        _generate(settings, prompts, destination, raw, resume, as_json, quiet)


def _generate(
    settings: Settings,
    prompts: list[Prompt],
    output: Destination | None,
    raw: bool,
    resume: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Answers what is not answered yet."""
    options = made_with(settings, raw)
    places = _places(output, prompts, options, resume)
    prompts = [each for each in prompts if each.number not in places]
    if output and places and not quiet:
        note(f"{output.path} has {len(places)} answers already, {len(prompts)} are to come")
    if output and not prompts:
        with output.opened(places):
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


def _places(
    output: Destination | None, prompts: Sequence[Prompt], options: Mapping[str, Any], resume: bool
) -> dict[int, Place]:
    """Where the answers lie that a run goes on from; HeadstockError for an output that holds anything but answers."""
    if resume:
        if output is None or output.stream:
            given = output and f"{output.path}, which holds none"
            raise HeadstockError("--resume goes on with a file", given=given, works="--output FILE")
        return answered(output.path, prompts, options)
    if output and not output.stream:
        for _ in written(output.path):
            pass  # any answers may be replaced, and nothing else
    return {}


def _lines(
    output: Destination | None, places: Mapping[int, Place], as_json: bool
) -> AbstractContextManager[Lines | None]:
    if output is not None:
        return output.opened(places)
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
            if not hasattr(error, "__notes__"):
                raise
            what = f"{error.__notes__[-1]}: {describe_fault(error).what}"  # the runner notes whose it is
            winners = (winner.backend for choice in engine.runner.decision.choices for winner in choice.winners)
            looks = " or ".join(f"headstock check {name}" for name in dict.fromkeys(winners))
            raise StepError(what, works="another backend", type=looks) from error


@contextmanager
def _interruptible() -> Iterator[Callable[[], int]]:
    """Tells which signal asked for an end, or 0, so that a step comes to its own: Ctrl-C, or a kind kill.

    The second Ctrl-C interrupts at once, and a second kill ends the process.
    """
    heard = 0

    def hear(number: int, _: object) -> None:
        nonlocal heard
        heard = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = {each: signal.signal(each, hear) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: heard
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
