"""`headstock diagnose`: says why attention is slow, with evidence in numbers and what to change."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from headstock.bench.recorded import read_trace
from headstock.bench.workload import parse
from headstock.cli.bench import Recorded, Workloads, check_lengths
from headstock.cli.hardware import Hardware
from headstock.cli.options import JSON, Choices, Limits, takes
from headstock.cli.question import model_config, question
from headstock.cli.settings import Settings
from headstock.cli.tables import document, measuring, paragraphs, progress
from headstock.errors import HeadstockError
from headstock.models.embedded import embedded_model
from headstock.negotiate import negotiate
from headstock.offer import own_names
from headstock.plugins import discover
from headstock.prints import stdout_to_stderr
from headstock.render import raise_unsolved

if TYPE_CHECKING:
    from headstock.bench.findings import Finding


@takes(Choices, Limits)
def diagnose(settings: Settings, workloads: Workloads = None, from_trace: Recorded = None, json: JSON = False) -> None:
    """Says why attention is slow for a model on a workload, or in a run that an engine recorded.

    The backends that would run, as chosen by the same flags and files as a run, are measured beside every other valid
    one and beside themselves on data that lies otherwise. Each finding has its numbers and what to change.
    """
    if (from_trace is not None) == bool(workloads):
        raise HeadstockError(
            "diagnose needs a workload or a trace", works="decode:8x1024, or --from-trace FILE, and not both"
        )
    forwards = read_trace(from_trace) if from_trace is not None else []
    loads = parse(workloads or ()) if workloads else []
    check_lengths(loads, settings)
    needs, policy = question(settings, Hardware.here(settings.choices.device))
    candidates = discover()
    decision = negotiate(needs, candidates, policy)
    if not decision.solved:
        raise_unsolved(decision)

    from headstock.bench.diagnose import Diagnosis
    from headstock.device import Device

    config = model_config(settings.choices.model or embedded_model())
    device = Device.open(settings.choices.device)
    options = own_names(settings.limits.backend_option, candidates)
    diagnosis = Diagnosis(config, decision, candidates, device, options=options)
    with stdout_to_stderr(), progress(not json and sys.stderr.isatty()) as report:
        tell = measuring(report)
        found = diagnosis.of_trace(forwards, tell) if forwards else diagnosis.of_workloads(loads, tell)
    if json:
        document(findings=[_as_json(finding) for finding in found], notices=list(decision.notices))
        return
    paragraphs(line for notice in decision.notices for line in (f"notice: {notice}", ""))
    paragraphs(line for finding in found for line in _lines(finding))
    if not found:
        print("nothing found: no valid backend is faster, and nothing stands in the way of the one that runs")


def _lines(finding: Finding) -> list[str]:
    gain = f", {finding.gain:.2f} times" if finding.gain > 1 else ""
    return [f"{finding.kind}{gain}: {finding.where}", f"  {finding.evidence}", f"  change: {finding.cure}"]


def _as_json(finding: Finding) -> dict[str, object]:
    return {
        "kind": finding.kind,
        "where": finding.where,
        "evidence": finding.evidence,
        "cure": finding.cure,
        "gain": finding.gain,
        "numbers": dict(finding.numbers),
    }
