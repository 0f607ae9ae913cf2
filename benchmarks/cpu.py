"""Decoding on a CPU: headstock beside transformers and beside the floor, by turns in one process.

    python benchmarks/cpu.py [--rounds N] [--json FILE]

The model is the embedded default, each engine in the same dtype on the same threads. The floor is one step's linear
layers and nothing else, fused as headstock fuses them: once in headstock's own memory layout, once through `F.linear`
on row-major weights. Figures are output tokens per second of decoding, prefill excluded; ratios are of medians.
Peak memory and the time from process start to the first token come from processes of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from report import environment

WORKLOADS: dict[str, list[tuple[int, int]]] = {  # name → (prompt tokens, new tokens) per row
    "batch 1": [(64, 64)],
    "batch 8": [(64, 64)] * 8,
    "mixed 8": [(16, 32), (32, 128), (48, 16), (64, 96), (96, 24), (128, 64), (192, 160), (256, 48)],
}
DTYPES = ("bfloat16", "float32")
ENGINES = ("headstock", "transformers eager", "transformers sdpa", "floor packed", "floor F.linear")


def prompts(rows: list[tuple[int, int]]) -> list[list[int]]:
    """Random token ids, the same for every engine; special tokens stand below 17."""
    draw = random.Random(0)
    return [[draw.randrange(100, 49000) for _ in range(length)] for length, _ in rows]


def headstock_engine(folder: Path, dtype: str) -> tuple[Any, Callable[[list[tuple[int, int]]], float]]:
    from headstock import ModelRunner
    from headstock.engine.generate import Generator
    from headstock.engine.sampling import SamplingParams
    from headstock.engine.tokenizer import Tokenizer

    runner = ModelRunner(folder, device="cpu", dtype=dtype, max_batch=8, kv_tokens=8192)
    tokenizer = Tokenizer.from_folder(folder)

    def run(rows: list[tuple[int, int]]) -> float:
        generator = Generator(runner, tokenizer)
        params = [SamplingParams(max_tokens=new, ignore_eos=True) for _, new in rows]
        generator.generate(prompts(rows), params)
        return generator.timing.decode_tokens / generator.timing.decode_seconds

    return runner, run


def transformers_engine(folder: Path, dtype: str, attention: str) -> Callable[[list[tuple[int, int]]], float]:
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation=attention)
    model.generation_config.eos_token_id = None

    class Lengths(StoppingCriteria):
        """Ends each row at its own length and notes the time of every step."""

        def __init__(self, rows: list[tuple[int, int]]):
            self.wanted = torch.tensor([new for _, new in rows])
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return len(self.times) >= self.wanted

    @torch.inference_mode()
    def run(rows: list[tuple[int, int]]) -> float:
        width = max(length for length, _ in rows)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts(rows)])
        mask = torch.tensor([[0] * (width - length) + [1] * length for length, _ in rows])
        lengths = Lengths(rows)
        model.generate(
            ids, attention_mask=mask, do_sample=False, pad_token_id=0, max_new_tokens=max(new for _, new in rows),
            stopping_criteria=StoppingCriteriaList([lengths]),
        )  # fmt: skip
        return sum(new - 1 for _, new in rows) / (lengths.times[-1] - lengths.times[0])

    return run


def floor_engine(runner: Any, packed: bool) -> Callable[[list[tuple[int, int]]], float]:
    """Steps of nothing but linear layers; a mixed batch is as wide as its rows still running."""
    linears = runner.model.linears()
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = list(linears)
    widths = [linear.dense().shape[1] for linear in linears]
    if not packed:
        dense = [(linear.dense().contiguous().clone(), linear.bias) for linear in linears]
        calls = [lambda x, w=weight, b=bias: F.linear(x, w, b) for weight, bias in dense]
    dtype = runner.model.dtype

    @torch.inference_mode()
    def run(rows: list[tuple[int, int]]) -> float:
        steps = [sum(new - 1 > step for _, new in rows) for step in range(max(new for _, new in rows) - 1)]
        inputs = {n: {w: torch.randn(n, w, dtype=dtype) for w in set(widths)} for n in set(steps)}
        started = time.perf_counter()
        for n in steps:
            for call, width in zip(calls, widths, strict=True):
                call(inputs[n][width])
        return sum(steps) / (time.perf_counter() - started)

    return run


def measure(folder: Path, dtype: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    runner, headstock = headstock_engine(folder, dtype)
    engines = {
        "headstock": headstock,
        "transformers eager": transformers_engine(folder, dtype, "eager"),
        "transformers sdpa": transformers_engine(folder, dtype, "sdpa"),
        "floor packed": floor_engine(runner, packed=True),
        "floor F.linear": floor_engine(runner, packed=False),
    }
    figures: dict[str, dict[str, list[float]]] = {}
    for workload, rows in WORKLOADS.items():
        for engine in engines.values():
            engine(rows)
        results: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, engine in engines.items():
                gc.collect()
                results[name].append(engine(rows))
        figures[workload] = results
    return figures


FIRST_TOKEN = {
    "headstock": """
import sys, time
from headstock.engine.generate import Generator
from headstock.engine.tokenizer import Tokenizer
from headstock.engine.sampling import SamplingParams
from headstock import ModelRunner
runner = ModelRunner(sys.argv[1], dtype=sys.argv[2], max_batch=8, kv_tokens=8192)
tokenizer = Tokenizer.from_folder(sys.argv[1])
ids = tokenizer.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
generator = Generator(runner, tokenizer)
first = []
generator.generate([ids], SamplingParams(max_tokens=32), on_text=lambda i, text: first or first.append(time.time()))
""",
    "transformers": """
import sys, time, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
first = []
class Note(BaseStreamer):
    calls = 0
    def put(self, value):
        self.calls += 1
        if self.calls == 2: first.append(time.time())
    def end(self): pass
chat = [{"role": "user", "content": "Why is the sky blue?"}]
ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
model.generate(**ids, max_new_tokens=32, do_sample=False, streamer=Note())
""",
}
# Linux hands a parent's ru_maxrss down to its children; VmHWM is that of this process alone.
EPILOGUE = """
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(first[0] - float(sys.argv[3]), int(peak) * 1024)
"""


def processes(folder: Path, dtype: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds to the first token and peak bytes of a whole process each, by turns."""
    figures: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "bytes": []} for name in FIRST_TOKEN}
    for turn in range(rounds + 1):
        for name, code in FIRST_TOKEN.items():
            command = [sys.executable, "-c", code + EPILOGUE, str(folder), dtype, str(time.time())]
            seconds, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2:]
            if turn:  # the first start compiles bytecode and fills the page cache
                figures[name]["seconds"].append(float(seconds))
                figures[name]["bytes"].append(float(peak))
    return figures


def profile(folder: Path, dtype: str, steps: int = 20) -> dict[str, float]:
    """Milliseconds of a decode step at batch 1 by torch operator, its own time only; the profiler's cost included."""
    from headstock import ModelRunner

    runner = ModelRunner(folder, device="cpu", dtype=dtype, max_batch=8, kv_tokens=8192)
    slot = runner.pages.open()
    runner.forward([slot], prompts([(64, 0)]))
    runner.forward([slot], [[100]])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            runner.forward([slot], [[100]])
    spent = {event.key: event.self_cpu_time_total / 1000 / steps for event in recorded.key_averages()}
    return {key: round(spent[key], 3) for key in sorted(spent, key=spent.__getitem__, reverse=True)[:24]}


def summarise(figures: dict[str, dict[str, list[float]]]) -> None:
    for workload, results in figures.items():
        medians = {name: statistics.median(values) for name, values in results.items()}
        best = max(medians["transformers eager"], medians["transformers sdpa"])
        print(f"  {workload}")
        for name in ENGINES:
            print(f"    {name:<20}{medians[name]:8.1f} tokens/s   ({min(results[name]):.1f}…{max(results[name]):.1f})")
        ours = medians["headstock"]
        print(
            f"    headstock / transformers {ours / best:.2f}, / floor packed {ours / medians['floor packed']:.2f}, "
            f"/ floor F.linear {ours / medians['floor F.linear']:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from headstock.models.folder import model_folder

    document: dict[str, Any] = {"environment": environment()}
    document |= {"decode_tokens_per_second": {}, "process": {}, "step_ms_by_operator": {}}
    for dtype in options.dtype or DTYPES:
        folder = model_folder(dtype=dtype)
        print(f"{dtype}, {torch.get_num_threads()} threads")
        started = processes(folder, dtype, min(options.rounds, 3))
        for name, values in started.items():
            seconds, peak = statistics.median(values["seconds"]), statistics.median(values["bytes"])
            print(f"  {name:<14} first token after {seconds:.2f} s, peak memory {peak / 2**20:.0f} MiB")
        document["process"][dtype] = started
        document["decode_tokens_per_second"][dtype] = figures = measure(folder, dtype, options.rounds)
        summarise(figures)
        document["step_ms_by_operator"][dtype] = profile(folder, dtype)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
