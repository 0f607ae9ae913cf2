"""`headstock prepare`: compiles ahead what a model's backends will run, for a GPU that need not be here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headstock.cli.gpus import gpu
from headstock.cli.options import AssumeGPU, Choices, Limits, takes
from headstock.cli.question import asked_hardware, model_config, question
from headstock.cli.settings import Settings
from headstock.cli.summary import tell_notices
from headstock.cli.tables import Report, note, progress
from headstock.models.embedded import embedded_model
from headstock.negotiate import negotiate
from headstock.offer import own_names
from headstock.plugins import discover
from headstock.prints import stdout_to_stderr
from headstock.render import raise_unsolved

if TYPE_CHECKING:
    from headstock.backend import Progress
    from headstock.device import Device
    from headstock.runner.preparation import Preparation


@takes(Choices, Limits)
def prepare(settings: Settings, assume_gpu: AssumeGPU = None) -> None:
    """Compiles ahead what a model's backends will run, so that no start has to wait for it.

    Backends are chosen as by generate, whose flags it takes; only the model's config is read. One that does not compile
    is passed over for the next best, unless it was asked for. What is compiled already costs nothing.
    """
    hardware = asked_hardware(settings, assume_gpu)
    needs, policy = question(settings, hardware)
    candidates = discover()
    decision = negotiate(needs, candidates, policy)
    if not decision.solved:
        raise_unsolved(decision)  # before torch is imported

    from headstock.runner.limits import Limits as RunLimits
    from headstock.runner.preparation import Preparation

    limits, rows = settings.limits, settings.limits.max_batch
    started, shown = time.perf_counter(), sys.stderr.isatty()
    device = _device(settings, assume_gpu)
    with stdout_to_stderr(), progress(shown) as bars:
        prepared = Preparation(
            model_config(settings.choices.model or embedded_model()),
            device,
            needs,
            candidates,
            policy,
            RunLimits.of(policy, device, rows, max(2048, rows), limits.mixed, limits.graph_sizes),
            own_names(limits.backend_option, candidates),
            limits.kv_tokens,
            _teller(bars),
        )
    tell_notices(prepared.notices)
    for who, roles in _ready(prepared).items():
        print(f"{', '.join(roles)}: {who} is ready")
    note(f"{time.perf_counter() - started:.1f} s, for {hardware.name}")


def _device(settings: Settings, assume_gpu: str | None) -> Device:
    """The device of the run, or one with the figures of the GPU that is assumed."""
    import torch

    from headstock.device import Device

    if assume_gpu is None:
        return Device.open(settings.choices.device)
    found = gpu(assume_gpu)
    name = settings.choices.device if settings.choices.device != "auto" else "cuda"
    return Device(torch.device(name), assume_gpu, found.compute_capability, found.num_sms)


def _teller(bars: Report | None) -> Callable[[Progress], None]:
    """Draws each step, or where nothing can be drawn, such as in a log, tells of each thing once it is done."""

    def tell(step: Progress) -> None:
        if bars is not None:
            bars(step.what, step.done, step.total)
        elif step.done == step.total:
            note(f"{step.what}: done")

    return tell


def _ready(prepared: Preparation) -> dict[str, list[str]]:
    """The roles that each backend, with its distribution, is ready for."""
    found: dict[str, list[str]] = {}
    for choice in prepared.decision.choices:
        for share, winner in choice.shares(prepared.limits.max_batch):
            found.setdefault(f"{winner.backend} ({winner.source})", []).append(share)
    return found
