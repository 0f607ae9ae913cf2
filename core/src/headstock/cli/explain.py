"""`headstock explain`: which backends a model would run on, and why not on others. Nothing is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from headstock.cli.hardware import Hardware, parse_device
from headstock.cli.options import Choices, takes
from headstock.cli.question import question
from headstock.cli.settings import Settings
from headstock.cli.tables import paragraphs
from headstock.errors import HeadstockError
from headstock.negotiate import negotiate
from headstock.plugins import discover
from headstock.render import explain as account

AssumeGPU = Annotated[
    str | None, typer.Option(metavar="GPU", help="decide for this GPU, such as h200, whether or not it is here")
]
All = Annotated[bool, typer.Option("--all", help="every refusal, not only the nearest")]
AsJSON = Annotated[bool, typer.Option("--json", help="print the decision, which --decision pins")]


@takes(Choices)
def explain(settings: Settings, assume_gpu: AssumeGPU = None, all: All = False, json: AsJSON = False) -> None:
    """Tells which backends a model would run on, and why.

    Only the model's config is read. Exits with 2 where no combination of backends can serve it.
    """
    needs, policy = question(settings, _hardware(settings, assume_gpu))
    decision = negotiate(needs, discover(), policy)
    if json:
        print(decision.model_dump_json(indent=2))
    else:
        asked = [f"  {choice}" for choice in settings.asked()]
        paragraphs([*(["Asked for", *asked] if asked else []), *account(decision, all)])
    if not decision.solved:
        raise typer.Exit(2)


def _hardware(settings: Settings, assume_gpu: str | None) -> Hardware:
    if assume_gpu is None:
        return Hardware.here(settings.choices.device)
    if parse_device(settings.choices.device)[0] not in ("auto", "cuda"):
        given = f"{assume_gpu} and {settings.origins['device']} {settings.choices.device}"
        raise HeadstockError("--assume-gpu contradicts the device", given=given, works="one of them")
    return Hardware.assumed(assume_gpu)
