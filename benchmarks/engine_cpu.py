"""The engine on a CPU: what a step costs beside the model, what a prefix cache brings, and peers by turns.

    python benchmarks/engine_cpu.py [--rounds N] [--requests N] [--json FILE] [--plot FILE.svg]

- *step*: milliseconds of a decode step of which model and attention take no time, by batch: the scheduler, page tables
  and batches, sampling, detokenising. What a backend plans of its own comes on top.
- *prefix*: the embedded model answers requests with one system prompt of 512 tokens, cache on and off by turns.
- *peers*: prompts and answers of the lengths that chats have, drawn with a seed, served by headstock, by transformers'
  continuous batching, and by transformers in padded batches that wait for their longest answer. Figures are output
  tokens per second of the whole run; ratios are of medians.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import environment

from headstock import ANY, AttentionBackend, Capabilities, Engine, ModelRunner, Offer
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.models.config import ModelConfig

BATCHES = (1, 8, 64, 256)
BUDGET_MS = {1: 0.15, 8: 0.2, 64: 0.5, 256: 1.5}
ROWS = 16  # at once, for every peer


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


def idle_engine(folder: Path, batch: int) -> Engine:
    """An engine in which `batch` requests decode for longer than they are measured."""
    can = Capabilities(
        devices={"cpu"}, phases={"extend", "decode"}, attention={"paged"}, dtypes={"float32"}, head_dims=ANY,
        page_sizes=ANY, kv_layouts={"nhd"},
    )  # fmt: skip
    config = ModelConfig.from_hf(
        {
            "model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 4096,
        }
    )  # fmt: skip
    runner = ModelRunner(
        config, dtype="float32", max_batch=batch, max_context=4096, kv_tokens=batch * 1536,
        offers=[Offer(name="idle", backend=Idle, capabilities=can)],
    )  # fmt: skip
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


def words(count: int, seed: int) -> list[int]:
    """So many token ids of ordinary words."""
    return random.Random(seed).choices(range(1000, 40000), k=count)


def embedded_runner(folder: Path) -> ModelRunner:
    return ModelRunner(folder, device="cpu", dtype="bfloat16", max_batch=ROWS, max_context=1024, kv_tokens=ROWS * 1024)


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


def serve(engine: Engine, requests: list[tuple[list[int], int]]) -> float:
    """Serves prompts, each for so many new tokens; new tokens per second."""
    started = time.perf_counter()
    for prompt, new in requests:
        engine.add_request(prompt, SamplingParams(max_tokens=new, ignore_eos=True))
    while engine.busy:
        engine.step()
    return sum(new for _, new in requests) / (time.perf_counter() - started)


def chat_lengths(count: int) -> list[tuple[int, int]]:
    """Prompt and answer lengths, seeded: medians of 32 and 64 tokens, with the long tails that chats have."""
    draw = random.Random(1)

    def length(median: float, spread: float, most: int) -> int:
        return min(max(int(draw.lognormvariate(0, spread) * median), 4), most)

    return [(length(32, 1.1, 384), length(64, 0.9, 320)) for _ in range(count)]


Serve = Callable[[list[tuple[list[int], int]]], float]


def transformers_peers(folder: Path) -> dict[str, Serve]:
    """Static padded batches, and continuous batching over a paged cache of the same number of tokens."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    greedy = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=384)
    static = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    paged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    static.generation_config = greedy
    pool = ContinuousBatchingConfig(page_size=256, num_blocks=ROWS * 4, max_batch_tokens=2048, use_cuda_graph=False)

    @torch.inference_mode()
    def padded(requests: list[tuple[list[int], int]]) -> float:
        started = time.perf_counter()
        for first in range(0, len(requests), ROWS):
            rows = requests[first : first + ROWS]
            width = max(len(prompt) for prompt, _ in rows)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in rows])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in rows])
            static.generate(ids, attention_mask=mask, max_new_tokens=max(new for _, new in rows))
        return sum(new for _, new in requests) / (time.perf_counter() - started)

    def continuous(requests: list[tuple[list[int], int]]) -> float:
        options = {"generation_config": greedy, "continuous_batching_config": pool, "warmup": False}
        with torch.inference_mode(), paged.continuous_batching_context_manager(**options) as manager:
            started, left = time.perf_counter(), len(requests)
            for prompt, new in requests:
                manager.add_request(input_ids=prompt, max_new_tokens=new, eos_token_id=-1)
            while left:
                result = manager.get_result(timeout=1)
                assert manager.is_running(), "its thread has died"
                left -= result is not None and result.is_finished()
            return sum(new for _, new in requests) / (time.perf_counter() - started)

    return {"transformers continuous": continuous, "transformers padded": padded}


def peers(runner: ModelRunner, folder: Path, rounds: int, requests: int) -> dict[str, list[float]]:
    """Output tokens per second of each by turns, after a round that is not counted."""
    tokenizer = Tokenizer.from_folder(folder)
    work = [(words(prompt, number), new) for number, (prompt, new) in enumerate(chat_lengths(requests))]

    def headstock(requests: list[tuple[list[int], int]]) -> float:
        with Engine(runner, tokenizer) as engine:
            return serve(engine, requests)

    serving: dict[str, Serve] = {"headstock": headstock, **transformers_peers(folder)}
    found: dict[str, list[float]] = {name: [] for name in serving}
    for turn in range(rounds + 1):
        for name, run in serving.items():
            gc.collect()
            figure = run(work if turn else work[:ROWS])
            if turn:
                found[name].append(figure)
    return found


def plot(document: dict[str, Any]) -> str:
    """The medians as bars, in SVG."""
    median = statistics.median
    prefix = document["prefix"]
    charts = {
        "step beside the model, ms": {f"batch {b}": each["median"] for b, each in document["step_ms"].items()},
        "first token after a system prompt of 512, s": {
            f"prefix cache {name}": median(each["first_token_seconds"]) for name, each in prefix.items()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="chats that the peers serve")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    from headstock.models.folder import model_folder

    folder = model_folder(dtype="bfloat16")
    document: dict[str, Any] = {"environment": environment()}
    print("a decode step beside the model")
    document["step_ms"] = step_overhead(folder, options.rounds)
    document["step_profile_batch_64"] = step_profile(folder)
    runner = embedded_runner(folder)
    document["prefix"] = found = prefix_cache(runner, folder, options.rounds)
    for figure in ("first_token_seconds", "tokens_per_second"):
        on, off = (statistics.median(found[name][figure]) for name in ("on", "off"))
        print(f"prefix cache on / off: {figure} {on:.3f} / {off:.3f}")
    document["peers_tokens_per_second"] = rates = peers(runner, folder, options.rounds, options.requests)
    for name, values in rates.items():
        print(f"  {name:<24}{statistics.median(values):8.1f} tokens/s   ({min(values):.1f}…{max(values):.1f})")
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        options.plot.write_text(plot(document), encoding="utf-8")


if __name__ == "__main__":
    main()
