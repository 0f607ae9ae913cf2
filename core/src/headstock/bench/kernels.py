"""The kernels behind a decision: what the chosen backends say that they run, on a few sizes, with a device at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from headstock.bench.profile import NONE, Options
from headstock.bench.report import kernel
from headstock.bench.stand import Contestant, Scenes
from headstock.bench.workload import Workload, parse
from headstock.decision import Choice, Decision
from headstock.device import Device
from headstock.models.config import ModelConfig
from headstock.offer import Candidate
from headstock.plugins import describe_fault
from headstock.prints import stdout_to_stderr
from headstock.runner.requirements import layer_groups

KEYS, TOKENS = 1024, 512
"""Keys of a row that decodes and new tokens of a prompt, or as many as the model has."""


@torch.inference_mode()
def kernels(
    decision: Decision, config: ModelConfig, candidates: Iterable[Candidate], device: Device, options: Options = NONE
) -> Iterator[str]:
    """A line for each role, winner and size; or why a winner tells nothing."""
    by_name = {each.name: each for each in candidates if each.usable}
    shapes = {group: config.layers[layers[0]] for group, layers in layer_groups(config).items()}
    for choice in decision.choices:
        need = choice.requirement
        cached = None if need.cached else decision.cached(choice.group)
        loads = _loads(choice)
        for winner in choice.winners:
            for load in (each for each in loads if choice.winner(each.rows) is winner):
                contestant = Contestant(by_name[winner.backend], need, shapes[choice.group], cached=cached)
                try:
                    with stdout_to_stderr(), device.active():
                        stand = Scenes(device, by_name.values(), cold_bytes=0).stand(
                            contestant, load, options=options.get(winner.backend)
                        )
                    told = kernel(stand.described) or "it does not describe its kernel"
                except Exception as error:
                    told = describe_fault(error).what
                yield f"{need.where}, {load.name}: {winner.backend}: {told}"


def _loads(choice: Choice) -> list[Workload]:
    """A few sizes of a role, which all its winners serve some of, and no more keys than it may have."""
    need = choice.requirement
    if need.phase == "extend":
        return parse(f"extend:1x{min(TOKENS, need.max_context)}")
    rows = {1, 32, *(each.max_batch + 1 for each in choice.winners if each.max_batch)}
    return parse(f"decode:{each}x{min(KEYS, need.max_context)}" for each in sorted(rows))
