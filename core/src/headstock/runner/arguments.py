"""The arguments of a model runner, refused by name before anything is done with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headstock.errors import HeadstockError
from headstock.models.config import ModelConfig
from headstock.offer import Candidate, Offer
from headstock.plugins import Discovered, Plugin
from headstock.policy import Policy


def check_types(policy: object, options: object, kv_tokens: object) -> None:
    """Refuses what could only fail later, and without a word of which argument it was."""
    for name, given, fits, works in (
        ("policy", policy, isinstance(policy, Policy), "a headstock.policy.Policy"),
        ("options", options, _is_nested(options), '{"BACKEND": {"OPTION": VALUE}}'),
        ("kv_tokens", kv_tokens, type(kv_tokens) is int, "a whole number"),
    ):
        if given is not None and not fits:
            raise HeadstockError(f"{name} has the wrong type", given=repr(given)[:80], works=works)


def check_sizes(config: ModelConfig, max_batch: int, max_tokens: int, max_context: int, mixed: str) -> None:
    """Refuses sizes that no step, or not this model, can have."""
    sizes = (("max_batch", max_batch, 1), ("max_tokens", max_tokens, max_batch), ("max_context", max_context, 1))
    for name, size, _ in sizes:
        if type(size) is not int:
            raise HeadstockError(f"{name} is a whole number", given=repr(size))
    if mixed not in ("auto", "extend", "split"):
        raise HeadstockError("mixed is not a way to run a step", given=mixed, works='"auto", "extend" or "split"')
    for name, size, least in sizes:
        if size < least:
            raise HeadstockError(f"{name} is too small", given=size, works=f"{least} or more")
    if max_context > config.max_context:
        works = f"at most {config.max_context}, the model's own"
        raise HeadstockError("max_context is too long for this model", given=max_context, works=works)


def put_forward(offers: Iterable[Offer | Candidate | Plugin]) -> tuple[list[Candidate], list[Plugin]]:
    """What takes part in negotiation, and the plugins behind it, each once."""
    candidates: list[Candidate] = []
    plugins: list[Plugin] = []
    for each in offers:
        if isinstance(each, Plugin):
            plugins.append(each)
            candidates += each.candidates()
        elif not isinstance(each, Offer | Candidate):
            raise HeadstockError(
                "offers are offers, candidates or plugins", given=repr(each)[:80], works="[*discover()]"
            )
        else:
            candidates.append(Candidate.of(each))
    plugins += [each.plugin for each in candidates if isinstance(each, Discovered)]
    return candidates, list({id(plugin): plugin for plugin in plugins}.values())


def _is_nested(options: object) -> bool:
    return isinstance(options, Mapping) and all(isinstance(own, Mapping) for own in options.values())
