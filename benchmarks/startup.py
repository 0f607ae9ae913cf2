"""Start-up of the command line: seconds of wall time per command, bare and with fifty more plugins installed.

    python benchmarks/startup.py --json benchmarks/results/startup.json

Times the installed console script, each command in a process of its own. The first start compiles every module anew,
the standard library's too (its bytecode goes to an empty folder); the others find that bytecode, as any later start
does. The budget of the median is 0.4 s bare and 0.6 s with fifty plugins.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

COMMANDS = ("--help", "plugins", "backends", "explain")
BUDGET = {"bare": 0.4, "50 plugins": 0.6}
RUNS = 9

MANIFEST = '''"""A plugin as light as a manifest should be."""
from headstock import ANY, Capabilities, Offer, hookimpl


@hookimpl
def attention_backends():
    can = Capabilities(
        devices={{"cpu", "cuda"}}, phases={{"extend", "decode"}}, attention={{"paged"}},
        dtypes={{"float32", "bfloat16"}}, head_dims={{64, 128}}, page_sizes=ANY, kv_layouts={{"nhd"}},
    )
    return [Offer(name="{name}", backend="{module}_kernels:Backend", capabilities=can)]
'''


def install_plugins(site: Path, count: int) -> None:
    """Lays `count` distributions with one plugin each into a folder for PYTHONPATH, as pip would into site-packages."""
    for number in range(count):
        name, module = f"bench-{number}", f"headstock_bench_{number}"
        info = site / f"{module}-1.0.dist-info"
        info.mkdir()
        (site / f"{module}.py").write_text(MANIFEST.format(name=name, module=module), encoding="utf-8")
        metadata = f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\nRequires-Dist: headstock>=0.1\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[headstock]\n{name} = {module}\n", encoding="utf-8")
        (info / "RECORD").write_text("", encoding="utf-8")


def seconds(script: str, command: str, environment: dict[str, str]) -> float:
    """Wall time of one start."""
    started = time.perf_counter()
    subprocess.run([script, command], env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def measure(script: str) -> dict[str, dict[str, dict[str, float]]]:
    """First start, median, least and greatest of the later ones, by set of plugins and command."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for installation, count in (("bare", 0), ("50 plugins", 50)):
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder, "site")
            site.mkdir()
            install_plugins(site, count)
            path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = {**os.environ, "PYTHONPATH": path}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            for command in COMMANDS:
                environment["PYTHONPYCACHEPREFIX"] = str(Path(folder, command))
                first = seconds(script, command, environment)
                times = [seconds(script, command, environment) for _ in range(RUNS)]
                figures = {"first": first, "median": statistics.median(times), "min": min(times), "max": max(times)}
                results.setdefault(installation, {})[command] = {key: round(value, 3) for key, value in figures.items()}
    return results


def hardware() -> str:
    """The CPU in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how quickly the command line starts.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    parser.add_argument("--script", default=str(Path(sys.executable).with_name("headstock")), help="what to start")
    arguments = parser.parse_args()
    results = measure(arguments.script)
    for installation, commands in results.items():
        for command, figures in commands.items():
            verdict = "within" if figures["median"] <= BUDGET[installation] else "OVER"
            numbers = "  ".join(f"{key} {value:.3f} s" for key, value in figures.items())
            print(f"{installation:<11}{command:<10}{numbers}  {verdict} {BUDGET[installation]} s")
    if arguments.json:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": "python " + " ".join([*sys.argv[:1], "--json", str(arguments.json)]),
            "hardware": hardware(),
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("typer", "rich", "pydantic", "pluggy")},
            "runs": RUNS,
            "budget": BUDGET,
            "seconds": results,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
