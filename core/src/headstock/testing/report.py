"""What a suite found, as a document for programs and as one HTML page for people."""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

import headstock
from headstock.bench.machine import packages
from headstock.capabilities import AXES
from headstock.testing.suite import Outcome, Suite

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Conformance of {{ backend }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 } td, th { text-align: left; padding: .25rem .75rem;
border-bottom: 1px solid #ddd; vertical-align: top } pre { white-space: pre-wrap; background: #f6f6f6; padding: .75rem }
.failed { color: #b00020; font-weight: 600 } .passed { color: #1b7837 }
</style></head><body>
<h1>Conformance of {{ backend }}</h1>
<p class="{{ 'passed' if passed else 'failed' }}">{{ summary }}</p>
<table>{% for key, value in environment.items() %}<tr><th>{{ key }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
{% for outcome in failures %}<h2 class="failed">{{ outcome.name }}</h2><pre>{{ outcome.message }}</pre>{% endfor %}
<h2>Axes</h2><table>
<tr><th>axis</th><th>declared</th><th>exercised</th><th>not here</th><th>could be declared</th></tr>
{% for axis in axes %}<tr><td>{{ axis.axis }}</td><td>{{ axis.declared | join("; ") }}</td>
<td>{{ axis.exercised | join(", ") }}</td><td>{{ axis.not_exercised | join(", ") }}</td>
<td>{{ axis.could_be_declared | join(", ") }}</td></tr>{% endfor %}</table>
<h2>Cases</h2><table><tr><th>case</th><th>law</th><th>status</th><th>ms</th></tr>
{% for outcome in outcomes %}<tr><td>{{ outcome.name }}</td><td>{{ outcome.law }}</td>
<td class="{{ outcome.status }}">{{ outcome.status }}</td><td>{{ (outcome.seconds * 1000) | round(1) }}</td></tr>
{% endfor %}</table></body></html>
"""


def summary(suite: Suite, outcomes: Sequence[Outcome]) -> str:
    """One line: how many passed, failed, and were refused."""
    counts = Counter(outcome.status for outcome in outcomes)
    told = [f"{counts[status]} {status}" for status in ("passed", "failed", "refused", "could be declared")]
    seconds = sum(outcome.seconds for outcome in outcomes)
    return f"{suite.offer.name}, {suite.level}: {', '.join(told)} in {seconds:.1f} s"


def axes(suite: Suite, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For each axis: what the records declare, which values cases asked for, and which could be declared as well."""
    coverage, untested = suite.coverage(), suite.untested()
    right = {outcome.name for outcome in outcomes if outcome.status == "could be declared"}
    return [
        {
            "axis": name,
            "declared": list(dict.fromkeys(_words(getattr(record, name)) for record in suite.offer.capabilities)),
            "exercised": coverage[name],
            "not_exercised": untested[name],
            "could_be_declared": [claim.name for claim in suite.claims if claim.axis == name and claim.name in right],
        }
        for name in AXES
    ]


def environment(suite: Suite) -> dict[str, str]:
    """What the suite ran on, with the versions of the backend's distribution and of what that requires."""
    import torch

    device = suite.device
    return packages([suite.candidate]) | {
        "backend": suite.offer.name,
        "source": suite.candidate.source,
        "device": device.name + (f", sm_{device.compute_capability}" if device.compute_capability else ""),
        "level": suite.level,
        "headstock": headstock.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def as_dict(suite: Suite, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The whole report as plain data."""
    return {
        "passed": all(outcome.good for outcome in outcomes),
        "summary": summary(suite, outcomes),
        "environment": environment(suite),
        "axes": axes(suite, outcomes),
        "cases": [
            {"name": o.name, "law": o.law, "status": o.status, "seconds": round(o.seconds, 4)}
            | ({"message": o.message} if o.message else {})
            for o in outcomes
        ],
    }


def as_html(suite: Suite, outcomes: Sequence[Outcome]) -> str:
    """The whole report as one page that needs nothing else."""
    import jinja2

    page = jinja2.Environment(autoescape=True).from_string(PAGE)
    return page.render(
        backend=suite.offer.name,
        passed=all(outcome.good for outcome in outcomes),
        summary=summary(suite, outcomes),
        environment=environment(suite),
        failures=[outcome for outcome in outcomes if not outcome.good],
        axes=axes(suite, outcomes),
        outcomes=outcomes,
    )


def _words(offered: Any) -> str:
    return ", ".join(sorted(offered)) if isinstance(offered, frozenset) else str(offered)
