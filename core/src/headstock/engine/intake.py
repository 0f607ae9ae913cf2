"""The intake of an engine: what may be asked of it, and how long an answer can become."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.errors import RequestError
from headstock.runner.runner import ModelRunner


def token_ids(prompt: str | Sequence[int], tokenizer: Tokenizer, called: str) -> list[int]:
    """The ids of a prompt, text or ids already; raises RequestError, naming it as `called`, for anything else."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise RequestError(
            f"{called} is neither text nor token ids", given=repr(prompt)[:80], works='"a text" or [1, 2, 3]'
        )
    ids = list(prompt)
    if strange := [token for token in ids if type(token) is not int]:
        raise RequestError(f"{called} holds what is no token id", given=repr(strange[0])[:80], works="integers")
    return ids


def check_options(params: Any, n: Any, priority: Any, namespace: Any) -> None:
    """Raises RequestError for how a prompt cannot be served: it would fail when it is too late."""
    for name, given, fits, works in (
        ("params", params, isinstance(params, SamplingParams), "SamplingParams(…)"),
        ("n", n, type(n) is int and n >= 1, "an integer ≥ 1, the number of samples"),
        ("priority", priority, type(priority) is int, "an integer"),
        ("namespace", namespace, _has_hash(namespace), "what can be the key of a dict: a text, a number, a tuple"),
    ):
        if not fits:
            raise RequestError(f"{name} cannot be used", given=repr(given)[:80], works=works)


def longest_answer(runner: ModelRunner, ids: Sequence[int], params: SamplingParams, called: str) -> int:
    """The most tokens that a prompt may be answered with; raises RequestError where it can never be served."""
    vocab = runner.config.vocab_size
    if not ids:
        raise RequestError(f"{called} is empty", works="at least one token")
    if not all(0 <= token < vocab for token in ids):
        raise RequestError(f"{called} holds a token outside the vocabulary", works=f"0…{vocab - 1}")
    params.check_stops(vocab)
    if len(ids) >= runner.max_context:
        longest = runner.config.max_context
        can_grow = runner.max_context < longest
        raise RequestError(
            f"{called} leaves no room for an answer",
            given=f"{len(ids)} tokens in a context of {runner.max_context}",
            works="a shorter prompt" + (", or a longer context" if can_grow else ""),
            type=f"--max-context {longest}" if can_grow else None,
        )
    limit = min(params.max_tokens, runner.max_context - len(ids))
    total = len(ids) + limit - 1
    if total > runner.memory.kv_tokens:
        raise RequestError(
            f"{called} with its answer can never fit into the KV cache",
            given=f"{len(ids)} prompt + {limit} new tokens, {runner.memory.kv_tokens} in the cache",
            works="a larger cache, or fewer new tokens",
            type=f"--kv-tokens {total}",
        )
    return limit


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except Exception:  # what a `__hash__` of its own may raise
        return False
    return True
