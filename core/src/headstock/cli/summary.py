"""What a run tells the person at the terminal, on standard error: who runs and why, on what memory, how fast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from headstock.cli.settings import Settings
from headstock.cli.tables import note

if TYPE_CHECKING:
    from headstock.engine.stats import EngineStats
    from headstock.runner.runner import ModelRunner


def tell_choice(settings: Settings, runner: ModelRunner) -> None:
    """What was asked for, who serves each role and why, and what memory goes to."""
    served: dict[str, list[str]] = {}
    for choice in runner.decision.choices:
        for share, winner in choice.shares(runner.limits.max_batch):
            served.setdefault(f"{winner.backend} ({winner.source}), {winner.why}", []).append(share)
    needs = [choice.requirement for choice in runner.decision.choices if choice.requirement.cached]
    caches = dict.fromkeys(f"page size {need.page_size}, {need.kv_layout}, {need.kv_dtype}" for need in needs)
    if asked := settings.asked():
        note(f"asked for: {', '.join(asked)}")
    for who, roles in served.items():
        note(f"{', '.join(roles)}: {who}")
    note(f"KV cache: {'; '.join(caches)}")
    note(f"memory: {', '.join(' '.join(line.split()) for line in runner.memory.lines())}")
    if runner.graphs is not None:
        note(f"graphs: {runner.graphs.cost()}")


def tell_notices(notices: Iterable[str]) -> None:
    """What the runner has to say of backends and observers that failed, and of what was asked for and is not used."""
    for notice in notices:
        note(f"notice: {notice}")


def describe(stats: EngineStats, seconds: float) -> str:
    """A running engine in a line, the first things first, since a terminal may cut it.

    The answers' tokens per second so far; who runs, waits and was helped by the prefix cache; how full the cache is;
    preemptions; the mean time to a first token and between tokens.
    """
    rate = stats.decode_tokens / seconds if seconds else 0.0
    said = [f"{rate:.0f} tokens/s, {stats.running} run, {stats.waiting} wait"]
    if stats.cached_tokens:
        said.append(f"{stats.hit_rate:.0%} cached")
    said.append(f"{1 - stats.free_pages / stats.pages:.0%} full")
    if stats.preemptions:
        said.append(f"{stats.preemptions} preempted")
    if stats.next_token.count:
        said.append(f"first {stats.first_token.mean:.2f} s, next {stats.next_token.mean * 1e3:.0f} ms")
    return ", ".join(said)


def tell_speed(stats: EngineStats) -> None:
    """Tokens per second by phase, and what an answer waited. What made its first token is the prompt's time."""
    output = stats.first_token.count + stats.next_token.count
    said = []
    if stats.prefill_seconds:
        rate = stats.prefill_tokens / stats.prefill_seconds
        said.append(f"prompt {stats.prefill_tokens} tokens, {rate:.1f} tokens/s")
    said.append(f"output {output} tokens")
    if stats.decode_seconds:
        said[-1] += f", {stats.decode_tokens / stats.decode_seconds:.1f} tokens/s after the first"
    if stats.cached_tokens:
        said.append(f"{stats.cached_tokens} prompt tokens from the prefix cache")
    if stats.next_token.count:
        first, following = stats.first_token.mean, stats.next_token.mean * 1e3
        said.append(f"the first token after {first:.2f} s, then one every {following:.0f} ms")
    if stats.preemptions:
        said.append(f"{stats.preemptions} preemptions: the cache is small for so many at once")
    note("; ".join(said))
