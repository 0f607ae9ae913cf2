"""A model of DeepSeek-V2-Lite's shape with random weights, end to end: tokens per second by backend and batch size.

    python benchmarks/mla_model.py [--backend NAME …] [--batch N …] [--context N] [--json FILE] [--plugin MODULE …]

Every installed backend that can decode the model (with `--plugin`, every one of these importable modules) is measured
in turn, in a process of its own, with the same weights and prompts: it decodes, and it extends in the form that it
serves. Decoding is the whole host, from slots and tokens to the next tokens on the host, with CUDA graphs where the
backend can be captured.

The byte limit of a step is the time in which the device would copy what has to be read: every weight but the embedding
and the experts that nobody chose, counted in a step of its own, and the latent cache. A figure's fraction of it is the
limit's time over the step's.

Where a backend serves both forms of latent attention, a row of new tokens after the context is extended in each, which
shows from how many tokens on expanding pays: `Policy.expand_from`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import environment, field
from torch import Tensor

from headstock import ModelRunner, negotiate
from headstock.device import Device, torch_dtype
from headstock.errors import HeadstockError
from headstock.models.config import ModelConfig
from headstock.models.moe import MoE
from headstock.models.shapes import EMBEDDING, weight_shapes
from headstock.offer import Candidate
from headstock.policy import Policy
from headstock.runner.requirements import requirements

SHAPE: dict[str, Any] = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "topk_method": "greedy", "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip
SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}
WARM_UP, STEPS, ROUNDS = 4, 32, 3
EXTENDS, FAR = (16, 32, 64, 128, 192, 256, 512, 1024), 16


def backends(config: ModelConfig, device: Device, dtype: str, candidates: list[Candidate]) -> list[str]:
    """The backends that can decode the model here."""
    found = []
    needs = requirements(
        config, device=device.torch.type, compute_capability=device.compute_capability, dtype=dtype, max_context=4096
    )
    for each in candidates:
        decision = negotiate(needs, candidates, Policy(backends={"decode": each.name}))
        found += [each.name] if decision.solved else []
    return sorted(found)


def policy(config: ModelConfig, device: Device, options: argparse.Namespace) -> Policy:
    """One backend for every role that it serves, at the page size given where it takes that."""
    needs = requirements(
        config, device=device.torch.type, compute_capability=device.compute_capability, dtype=options.dtype
    )
    for scopes in (("all",), ("decode",)):
        for page_size in (options.page_size, None):
            asked = Policy(backends=dict.fromkeys(scopes, options.child), page_size=page_size)
            if negotiate(needs, field(options.plugin), asked).solved:
                return asked
    raise HeadstockError("this backend cannot decode the model", given=options.child)


def bandwidth(device: Device) -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    size = (4 << 30) if device.torch.type == "cuda" else (64 << 20)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device.torch) for _ in range(2))
    target.copy_(source)
    return 2 * size / min(device.seconds(lambda: target.copy_(source)) for _ in range(5))


class Decoding:
    """Rows of one runner, each with `context` tokens cached, that decode greedily."""

    def __init__(self, runner: ModelRunner, rows: int, context: int):
        self.runner, self.rows = runner, rows
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, runner.config.vocab_size, (rows, context), generator=draw).tolist()
        self.slots = [runner.pages.open() for _ in range(rows)]
        self.last: list[int] = []
        chunk = runner.limits.max_tokens
        started = time.perf_counter()
        for slot, prompt in zip(self.slots, prompts, strict=True):
            for start in range(0, context, chunk):
                logits = runner.forward([slot], [prompt[start : start + chunk]])
            self.last.append(int(logits[0].argmax()))
        self.extend_rate = rows * context / (time.perf_counter() - started)

    def step(self) -> None:
        done = self.runner.step(self.slots, [[token] for token in self.last])
        tokens = done.sampled.tokens if done.sampled else done.logits.argmax(-1)
        self.last = tokens.tolist()

    def seconds(self) -> float:
        """The median over rounds of a step's seconds."""
        for _ in range(WARM_UP):
            self.step()
        rounds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for _ in range(STEPS):
                self.step()
            rounds.append((time.perf_counter() - started) / STEPS)
        return statistics.median(rounds)

    def bytes_read(self) -> int:
        """What one more step has to read: weights, those of the chosen experts alone, and the cache."""
        config, chosen = self.runner.config, []
        layers = [layer.feed_forward for layer in self.runner.model.layers if isinstance(layer.feed_forward, MoE)]
        routers = [layer.router for layer in layers]

        def counting(router: Any) -> Any:
            def route(x: Tensor) -> tuple[Tensor, Tensor]:
                weights, experts = router(x)
                chosen.append(len(experts.unique()))
                return weights, experts

            return route

        graphs, self.runner.graphs = self.runner.graphs, None
        for layer, router in zip(layers, routers, strict=True):
            layer.router = counting(router)
        self.step()
        self.runner.graphs = graphs
        for layer, router in zip(layers, routers, strict=True):
            layer.router = router
        sizes = {name: torch.Size(shape).numel() for name, shape in weight_shapes(config).items()}
        always = sum(n for name, n in sizes.items() if name != EMBEDDING and ".mlp.experts." not in name)
        expert = 3 * config.hidden_size * config.moe.intermediate_size if config.moe else 0
        itemsize = torch_dtype(self.runner.dtype).itemsize
        cached = sum(self.runner.pages.length(slot) for slot in self.slots)
        per_token = self.runner.memory.bytes_per_page // self.runner.page_size
        return (always + expert * sum(chosen)) * itemsize + cached * per_token

    def close(self) -> None:
        for slot in self.slots:
            self.runner.pages.close(slot)


def crossover(runner: ModelRunner, context: int) -> dict[str, dict[str, float]]:
    """Milliseconds of extending one row by so many tokens after `context` cached ones, in each form."""
    slot, figures = runner.pages.open(), {}
    for start in range(0, context, runner.limits.max_tokens):
        runner.forward([slot], [[1] * min(context - start, runner.limits.max_tokens)])
    default = runner.steps.expand_from
    for count in (n for n in EXTENDS if n < runner.max_context - context):
        figures[str(count)] = own = {}
        for form, bound in (("absorbed", None), ("expanded", 2)):
            runner.steps.expand_from = bound
            spent = []
            for _ in range(2 + ROUNDS):
                runner.device.synchronize()
                started = time.perf_counter()
                runner.forward([slot], [[1] * count])
                runner.device.synchronize()
                spent.append((time.perf_counter() - started) * 1e3)
                runner.pages.lengths[slot] = context
            own[form] = statistics.median(spent[2:])
    runner.steps.expand_from = default
    runner.pages.close(slot)
    return figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One backend's figures."""
    device = Device.open(options.device)
    shape = SHAPE | (SMALL if options.small else {}) | {"num_hidden_layers": options.layers}
    config = ModelConfig.from_hf(shape)
    rows, tokens = max(options.batch), WARM_UP + ROUNDS * STEPS + 1
    longest = FAR * options.context + EXTENDS[-1] + 1
    chosen = policy(config, device, options)
    started = time.perf_counter()
    runner = ModelRunner(
        config, device=options.device, dtype=options.dtype, policy=chosen, offers=field(options.plugin), max_batch=rows,
        max_tokens=max(8192, rows), max_context=longest, graph_sizes=options.batch,
        kv_tokens=max(rows * (options.context + tokens + 64), longest + 64),
    )  # fmt: skip
    figures: dict[str, Any] = {
        "roles": {choice.role: winner.backend for choice in runner.decision.choices for winner in choice.winners},
        "page_size": runner.page_size,
        "memory": [" ".join(line.split()) for line in runner.memory.lines()],
        "start_seconds": time.perf_counter() - started,
        "notices": runner.notices,
        "batches": {},
    }
    rate = bandwidth(device)
    for batch in options.batch:
        decoding = Decoding(runner, batch, options.context)
        replays = runner.graphs.replays.total() if runner.graphs else 0
        seconds = decoding.seconds()
        graphs = bool(runner.graphs) and runner.graphs.replays.total() - replays == WARM_UP + ROUNDS * STEPS
        limit = decoding.bytes_read() / rate
        decoding.close()
        figures["batches"][str(batch)] = {
            "tokens_per_second": batch / seconds, "step_ms": seconds * 1e3, "byte_limit_ms": limit * 1e3,
            "fraction_of_limit": limit / seconds, "graphs": graphs, "extend_tokens_per_second": decoding.extend_rate,
        }  # fmt: skip
    if {"extend", "expand"} <= figures["roles"].keys():
        contexts = (options.context, FAR * options.context)
        figures["crossover_ms"] = {str(context): crossover(runner, context) for context in contexts}
        figures["expand_from"] = runner.steps.expand_from
    return figures | {"copy_bytes_per_second": rate}


def in_a_process(name: str, arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        subprocess.run([sys.executable, __file__, *arguments, "--child", name, "--json", str(file)], check=True)
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return figures


def summarise(name: str, figures: dict[str, Any]) -> None:
    roles = ", ".join(f"{role} {backend}" for role, backend in figures["roles"].items())
    print(f"{name} ({roles}; page {figures['page_size']})")
    for batch, own in figures["batches"].items():
        print(
            f"  batch {batch:>4} {own['tokens_per_second']:9.0f} tokens/s  {own['step_ms']:8.2f} ms  "
            f"{own['fraction_of_limit']:5.0%} of the byte limit  {'graphs' if own['graphs'] else 'eager'}  "
            f"extends {own['extend_tokens_per_second']:9.0f} tokens/s"
        )
    for context, counts in figures.get("crossover_ms", {}).items():
        for count, own in counts.items():
            forms = f"absorbed {own['absorbed']:7.2f} ms, expanded {own['expanded']:7.2f} ms"
            print(f"  {count:>5} new tokens after {context:>6}: {forms}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", help="by default all that can decode the model")
    parser.add_argument("--plugin", action="append", help="a module to take backends from, in place of all")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--context", type=int, default=1024, help="tokens cached per row before decoding")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="narrow layers, to try the script where there is no GPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        options.json.write_text(json.dumps(measure(options)), encoding="utf-8")
        return
    config = ModelConfig.from_hf(SHAPE)
    names = options.backend or backends(config, Device.open(options.device), options.dtype, field(options.plugin))
    passed = sys.argv[1:]
    document: dict[str, Any] = {"environment": environment(), "context": options.context, "backends": {}}
    for name in names:
        document["backends"][name] = in_a_process(name, passed)
        summarise(name, document["backends"][name])
        if options.json:  # after each, so that a run that is cut keeps what it has
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
