"""The chats of engine_cpu.py, and those who serve them: headstock, transformers in two ways, and vLLM."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from headstock import Engine, ModelRunner
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer

ROWS = 16  # at once, for every peer
CONTEXT = 1024
MAX_TOKENS = 2048  # of a step

Requests = list[tuple[list[int], int]]
"""Prompts, as token ids, each with the number of tokens that answer it."""

Serve = Callable[[Requests], float]
"""Serves requests; new tokens per second."""


def words(count: int, seed: int) -> list[int]:
    """So many token ids of ordinary words."""
    return random.Random(seed).choices(range(1000, 40000), k=count)


def chats(count: int) -> Requests:
    """Requests of seeded lengths: medians of 32 and 64 tokens, with the long tails that chats have."""
    draw = random.Random(1)

    def length(median: float, spread: float, most: int) -> int:
        return min(max(int(draw.lognormvariate(0, spread) * median), 4), most)

    lengths = [(length(32, 1.1, 384), length(64, 0.9, 320)) for _ in range(count)]
    return [(words(prompt, number), new) for number, (prompt, new) in enumerate(lengths)]


def serve(engine: Engine, requests: Requests) -> float:
    """Serves requests by a headstock engine; new tokens per second."""
    started = time.perf_counter()
    for prompt, new in requests:
        engine.add_request(prompt, SamplingParams(max_tokens=new, ignore_eos=True))
    while engine.busy:
        engine.step()
    return sum(new for _, new in requests) / (time.perf_counter() - started)


def transformers_peers(folder: Path) -> dict[str, Serve]:
    """Static padded batches, and continuous batching over a paged cache of the same number of tokens."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    greedy = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=384)
    static = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    paged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    static.generation_config = greedy
    pool = ContinuousBatchingConfig(
        page_size=256, num_blocks=ROWS * CONTEXT // 256, max_batch_tokens=MAX_TOKENS, use_cuda_graph=False
    )

    @torch.inference_mode()
    def padded(requests: Requests) -> float:
        started = time.perf_counter()
        for first in range(0, len(requests), ROWS):
            rows = requests[first : first + ROWS]
            width = max(len(prompt) for prompt, _ in rows)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in rows])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in rows])
            static.generate(ids, attention_mask=mask, max_new_tokens=max(new for _, new in rows))
        return sum(new for _, new in requests) / (time.perf_counter() - started)

    def continuous(requests: Requests) -> float:
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


class VLLM:
    """vLLM in a process of its own, which loads the model once, serves when it is its turn, and sleeps otherwise.

    `about` holds its versions, threads, seconds to load, and the `seconds` of each turn, the first one's too. Its
    engine runs in that process itself, since a scheduler apart would take one of few cores; Intel's OpenMP runtime,
    which is installed with it, is loaded first, as its manual advises.
    """

    def __init__(self, python: Path, folder: Path, requests: Requests):
        work = {
            "model": str(folder), "dtype": "bfloat16", "threads": torch.get_num_threads(), "rows": ROWS,
            "context": CONTEXT, "max_tokens": MAX_TOKENS, "requests": requests,
        }  # fmt: skip
        openmp = python.parent.parent / "lib" / "libiomp5.so"
        environment = {
            **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
        }  # fmt: skip
        with TemporaryDirectory() as home:
            path = Path(home, "work.json")
            path.write_text(json.dumps(work), encoding="utf-8")
            command = [python, Path(__file__).with_name("vllm_peer.py"), path]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
            self.about = {**self._answer(), "seconds": []}  # it has read the file then

    def __call__(self, requests: Requests) -> float:
        """Serves the first of the requests that it has, which these must be; new tokens per second."""
        assert self.process.stdin is not None, "a pipe"
        print(len(requests), file=self.process.stdin, flush=True)
        answer = self._answer()
        self.about["seconds"].append(answer["seconds"])
        return float(answer["tokens_per_second"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None, "a pipe"
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM ended with status {self.process.wait()}: what it said stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> VLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.communicate()  # the end of its input is its own


def peers(
    runner: ModelRunner, folder: Path, rounds: int, requests: int, vllm: Path | None
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Output tokens per second of each by turns, after a round that is not counted, and what vLLM says of itself."""
    tokenizer, work, about = Tokenizer.from_folder(folder), chats(requests), {}

    def headstock(requests: Requests) -> float:
        with Engine(runner, tokenizer) as engine:
            return serve(engine, requests)

    serving: dict[str, Serve] = {"headstock": headstock, **transformers_peers(folder)}
    with ExitStack() as stack:
        if vllm is not None:
            serving["vLLM"] = other = stack.enter_context(VLLM(vllm, folder, work))
            about = other.about
        found: dict[str, list[float]] = {name: [] for name in serving}
        for turn in range(rounds + 1):
            for name, run in serving.items():
                gc.collect()
                figure = run(work if turn else work[:ROWS])
                if turn:
                    found[name].append(figure)
    return found, about
