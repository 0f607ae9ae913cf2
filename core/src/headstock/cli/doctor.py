"""`headstock doctor`: loads every plugin in a process of its own, and has a cure for what does not survive that."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

import headstock
from headstock.bench.profile import default_folder
from headstock.cli.options import JSON, Config
from headstock.cli.settings import Settings, working_folder
from headstock.cli.tables import document, faults, table
from headstock.errors import HeadstockError
from headstock.models.cache import default_cache_dir, size_of
from headstock.offer import Fault, canonical
from headstock.plugins import ALLOW_LIST, entry_points, installed
from headstock.requires import missing_packages

Timeout = Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="seconds that a plugin may take to load")]


def doctor(timeout: Timeout = 60.0, config: Config = None, json: JSON = False) -> None:
    """Checks what is installed, and tells what to do about each fault.

    Every plugin is imported with its backend classes, each in a process of its own. Exits with 1 if there is a fault.
    """
    working_folder()
    environment, wrong = _environment(config, timeout)
    plugins = _plugins(timeout)
    faulty = bool(wrong) or any(plugin["faults"] for plugin in plugins)
    if json:
        document(
            healthy=not faulty,
            environment=environment,
            plugins=plugins,
            faults=[{"subject": subject, **fault.model_dump()} for subject, fault in wrong],
        )
    else:
        table(("environment", ""), list(environment.items()))
        print()
        table(("plugin", "status", "distribution", "backends"), [_row(plugin) for plugin in plugins])
        for plugin in plugins:
            if plugin["facts"]:
                print()
                table((plugin["name"], ""), list(plugin["facts"].items()))
        faults([*wrong, *((p["name"], Fault(**fault)) for p in plugins for fault in p["faults"])])
    if faulty:
        raise typer.Exit(1)


def _environment(config: Path | None, timeout: float) -> tuple[dict[str, str], list[tuple[str, Fault]]]:
    """What the host runs on, and what is wrong with that."""
    found = {
        "headstock": headstock.__version__,
        "python": f"{platform.python_version()}, {sys.executable}",
        "platform": platform.platform(),
    }
    wrong = []
    loaded = _examine(timeout, "torch")
    if isinstance(loaded, Fault):
        cure = "reinstall it: pip install --force-reinstall torch"
        wrong.append(("torch", loaded.model_copy(update={"cure": cure})))
    else:
        found |= loaded
    try:
        settings = Settings.load(config, {})
        found["configuration"] = str(settings.file or "none")
        found |= profile_told(settings, config, timeout)
    except HeadstockError as error:
        wrong.append(("configuration", Fault(what=str(error), cure="mend the file, or name another with --config")))
    models, size = size_of(default_cache_dir())
    found["cache"] = f"{default_cache_dir()}, {models} converted models, {size / 2**30:.2f} GiB; may be removed"
    if ALLOW_LIST in os.environ:
        found[ALLOW_LIST] = os.environ[ALLOW_LIST]
    try:
        requires = metadata.requires("headstock") or []
    except metadata.PackageNotFoundError:
        requires = []  # run from its source, not installed
    if missing := missing_packages(requires, {}):
        wrong.append(("headstock", missing))
    return found, wrong


def profile_told(settings: Settings, config: Path | None, timeout: float) -> dict[str, str]:
    """The profile that negotiation would rank by, and what is wrong with it; nothing where there can be none."""
    choices = settings.choices
    if not choices.profile or (choices.profile_file is None and not default_folder().exists()):
        return {}
    told = _examine(timeout, "profile", *([str(config)] if config else []))
    return {"profile": f"nothing can be told of it: {told.what}"} if isinstance(told, Fault) else told


def _plugins(timeout: float) -> list[dict[str, Any]]:
    """A report on every plugin, whatever HEADSTOCK_PLUGINS says, sorted by name."""
    points = {canonical(point.name): point for point in entry_points()}
    names = sorted(points)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        examined = list(pool.map(lambda name: _examine(timeout, "plugin", name), names))
    outcomes = zip(names, examined, strict=True)
    reports = [report for name, outcome in outcomes for report in _reports(points[name], outcome)]
    # Only a look at all of them together finds two that clash; what did not live to list its backends stays out.
    survived = [report["name"] for report in reports if report["backends"] or not report["faults"]]
    for plugin in installed(survived):
        for report in reports:
            known = [fault["what"] for fault in report["faults"]]
            if report["name"] == plugin.name and plugin.fault and plugin.fault.what not in known:
                report["faults"].append(plugin.fault.model_dump())
    return reports


def _reports(point: metadata.EntryPoint, outcome: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(outcome, Fault):
        yield from outcome
        return
    distribution = point.dist.name if point.dist else ""
    cure = f"pip uninstall {distribution}, or leave it out: {ALLOW_LIST}=-{point.name}"
    source = f"{distribution} {point.dist.version if point.dist else ''}".strip()
    fault = outcome.model_copy(update={"cure": cure}).model_dump()
    yield {"name": point.name, "distribution": source, "backends": [], "facts": {}, "faults": [fault]}


def _examine(timeout: float, *subject: str) -> Any:
    """What `headstock.cli.examine` reports of a subject; a Fault where its process did not live to tell."""
    with tempfile.TemporaryDirectory() as folder:
        report, errors = Path(folder, "report.json"), Path(folder, "stderr")
        command = [sys.executable, "-P", "-m", "headstock.cli.examine", str(report), *subject]
        with errors.open("wb") as stderr:
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, timeout=timeout
                )
            except subprocess.TimeoutExpired:
                return Fault(what=f"it did not finish loading within {timeout:g} s")
        if done.returncode == 0 and report.is_file():
            return json.loads(report.read_text(encoding="utf-8"))
        printed = errors.read_text(encoding="utf-8", errors="replace")
    last = next((line for line in reversed(printed.splitlines()) if line and not line[0].isspace()), "")
    said = f": {last}" if last else ""
    if done.returncode < 0:
        killed = f"loading it killed the process with {signal.Signals(-done.returncode).name}"
        return Fault(what=f"{killed}{said}", detail=printed)
    return Fault(what=f"loading it ended the process with exit code {done.returncode}{said}", detail=printed)


def _row(plugin: dict[str, Any]) -> list[str]:
    status = "broken" if plugin["faults"] else "ok"
    return [plugin["name"], status, plugin["distribution"], ", ".join(plugin["backends"])]
