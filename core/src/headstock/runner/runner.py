"""The model runner: requirements, negotiation, memory, backends, weights, and then one forward per step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstock.backend import Progress as Preparation
from headstock.device import Device, torch_dtype
from headstock.errors import HeadstockError
from headstock.kv.allocator import PageAllocator
from headstock.kv.page_table import PageTable
from headstock.kv.pool import KVPool
from headstock.kv.window import WindowPages
from headstock.layer import AttentionLayer
from headstock.models.config import ModelConfig
from headstock.models.llama import Progress
from headstock.models.registry import model_class
from headstock.models.weights import WeightSource
from headstock.offer import Candidate, Offer
from headstock.plugins import Discovered, Observers, Plugin, installed
from headstock.policy import Policy
from headstock.runner.instances import Instance, Limits
from headstock.runner.levels import Levels
from headstock.runner.requirements import layer_groups, requirements
from headstock.runner.selection import Selection, own_names
from headstock.runner.step import Mixed, Steps

MAX_LEVELS = 3
"""Most levels of shared prefixes in a batch: a system prompt, an example or a document, a conversation."""


class ModelRunner:
    """A model, its KV cache and the backends that were chosen for it.

    `model` is a Hugging Face folder, or a ModelConfig for random weights. Everything that can be refused is refused
    before weights are read: requirements, negotiation (`policy` among `offers`, by default the installed plugins), the
    memory plan, loading, and a probe of every backend. A backend that fails in this, or whose workspace leaves no room
    for a cache, is passed over, loudly, for the next best in every role for which it was not asked for by name.

    Observers are called of the plugins among `offers`, and of those that candidates among them were discovered in: what
    is not offered is not heard. A plugin that only observes is offered as itself, as in `[*installed(), mine]`.

    `dtype`, also as torch has it, and `kv_dtype` are torch names or "auto"; `max_batch` rows, `max_tokens` tokens per
    forward, `max_context` tokens per request and `kv_tokens` tokens in the cache bound memory. A step of both single
    tokens and longer rows is one EXTEND segment, or with `mixed="split"` a DECODE and an EXTEND segment. `notices`
    collects what the user should know.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig,
        *,
        device: str = "cpu",
        dtype: str | torch.dtype = "auto",
        kv_dtype: str = "auto",
        max_batch: int = 32,
        max_tokens: int = 2048,
        max_context: int | None = None,
        kv_tokens: int | None = None,
        policy: Policy | None = None,
        offers: Iterable[Offer | Candidate | Plugin] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        progress: Progress | None = None,
        mixed: Mixed = "extend",
        seed: int = 0,
    ):
        self.config = model if isinstance(model, ModelConfig) else ModelConfig.from_folder(model)
        self.device = Device.open(device)
        dtype = str(dtype).removeprefix("torch.")
        self.dtype = self.device.default_dtype(self.config.dtype) if dtype == "auto" else dtype
        self.notices: list[str] = []
        self.max_context = self.config.max_context if max_context is None else max_context
        self.mixed: Mixed = mixed
        _check_types(policy, options, kv_tokens)
        policy = policy or Policy()
        levels = 0 if policy.cascade == "off" else MAX_LEVELS
        self.limits = Limits(max_batch, max_tokens, max_plans=2 if mixed == "split" else 1, max_levels=levels)
        self._check_sizes()

        candidates, plugins = _put_forward(installed() if offers is None else offers)
        self.observers = Observers(plugins, self.notices.append)
        self._choose(candidates, policy, kv_dtype, options or {}, kv_tokens, progress)
        self._load_model(model, progress, seed)
        self._make_cache(always_share=policy.cascade == "on")

    def _check_sizes(self) -> None:
        rows, tokens, *_ = self.limits
        for name, number in (("max_batch", rows), ("max_tokens", tokens), ("max_context", self.max_context)):
            if type(number) is not int:
                raise HeadstockError(f"{name} is a whole number", given=repr(number))
        if self.mixed not in ("extend", "split"):
            raise HeadstockError("mixed is not a way to run a step", given=self.mixed, works='"extend" or "split"')
        for name, size, least in (
            ("max_batch", rows, 1),
            ("max_tokens", tokens, rows),
            ("max_context", self.max_context, 1),
        ):
            if size < least:
                raise HeadstockError(f"{name} is too small", given=size, works=f"{least} or more")
        if self.max_context > self.config.max_context:
            works = f"at most {self.config.max_context}, the model's own"
            raise HeadstockError("max_context is too long for this model", given=self.max_context, works=works)

    def _choose(
        self,
        candidates: list[Candidate],
        policy: Policy,
        kv_dtype: str,
        options: Mapping[str, Mapping[str, Any]],
        kv_tokens: int | None,
        progress: Progress | None,
    ) -> None:
        def report(step: Preparation) -> None:
            if progress:
                progress(step.what, step.done, step.total)

        needs = requirements(
            self.config,
            device=self.device.torch.type,
            compute_capability=self.device.compute_capability,
            dtype=self.dtype,
            kv_dtype=None if kv_dtype == "auto" else kv_dtype,
            max_context=self.max_context,
            cascade=policy.cascade,
        )
        own = own_names(options, candidates)
        chosen = Selection(self.config, self.device, needs, candidates, policy, self.limits, own, kv_tokens, report)
        self.decision, self.roles, self.memory = chosen.decision, chosen.roles, chosen.memory
        self.page_size, self.candidates = self.memory.page_size, chosen.candidates
        self.instances: list[Instance] = chosen.instances
        self.notices += chosen.notices
        self.observers.notify("on_decision", decision=self.decision)

    def _load_model(self, model: str | Path | ModelConfig, progress: Progress | None, seed: int) -> None:
        self.model = model_class(self.config)(self.config, torch_dtype(self.dtype), self.device.torch)
        if isinstance(model, ModelConfig):
            self.model.init_random(seed)
        else:
            self.model.load(WeightSource(model), progress)

    def _make_cache(self, always_share: bool) -> None:
        groups, memory = layer_groups(self.config), self.memory
        rows, table_pages = self.limits.max_batch, memory.num_pages
        windows = {
            window: WindowPages(window, plan.num_pages, self.page_size, table_pages, rows)
            for window, plan in memory.windows.items()
        }
        self.pages = PageTable(PageAllocator(table_pages), self.page_size, rows, self.max_context, windows)
        layers: dict[int, AttentionLayer] = {}
        for group, indices in groups.items():
            instance = self.roles[group, "extend"]
            window = instance.spec.window
            num_pages = memory.windows[window].num_pages if window else table_pages
            pool = KVPool(instance.spec, instance.layout, len(indices), num_pages)
            layers |= {i: AttentionLayer(i, view) for i, view in zip(indices, pool.views, strict=True)}
        decoding = {group: self.roles[group, "decode"] for group in groups}
        sharing = {group: each for group, each in decoding.items() if each.spec.max_levels}
        levels = Levels(self.pages, self.device, sharing, always_share)
        self.steps = Steps(
            self.pages, levels, self.device, self.roles, groups, layers, self.observers, self.mixed,
            self.config.vocab_size,
        )  # fmt: skip

    @torch.inference_mode()
    def forward(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Runs one step and returns the logits of each request's last token, [len(slots), vocab].

        `slots` are requests opened in `pages`, `tokens` the new tokens of each, one or more, which follow those cached.
        Raises OutOfPages when the cache cannot take them, RequestError beyond a request's context, and HeadstockError
        for a step that is empty, too large, or names a slot twice; nothing is run then and nothing lost. What a backend
        raises passes, with a note of whose step it was.
        """
        query_lens = [len(each) for each in tokens]
        if not (len(slots) == len(set(slots)) == len(tokens) and 0 < sum(query_lens) <= self.limits.max_tokens):
            raise HeadstockError(
                "a step has distinct slots, each with its new tokens",
                given=f"slots {list(slots)} with {query_lens} tokens",
                works=f"1…{self.limits.max_tokens} tokens in all",
            )
        seq_lens = [self.pages.length(slot) + n for slot, n in zip(slots, query_lens, strict=True)]
        self.pages.reserve(dict(zip(slots, seq_lens, strict=True)))
        step = self.steps.make(slots, tokens)
        try:
            segments = self.steps.plan(step)
            logits = self.model.forward(step.ids, step.positions, self.steps.attend(segments), step.last)
        except BaseException as error:
            error.add_note(f"a step of {self.steps.served_by(step)} failed")
            raise
        for slot, count in zip(slots, query_lens, strict=True):
            self.pages.advance(slot, count)
        for group in segments.values():
            for segment in group:
                self.observers.notify("after_forward", batch=segment.batch)
        return step.in_order_given(logits)


def _check_types(policy: object, options: object, kv_tokens: object) -> None:
    """Refuses what could only fail later, and without a word of which argument it was."""
    for name, given, fits, works in (
        ("policy", policy, isinstance(policy, Policy), "a headstock.policy.Policy"),
        ("options", options, _is_nested(options), '{"BACKEND": {"OPTION": VALUE}}'),
        ("kv_tokens", kv_tokens, type(kv_tokens) is int, "a whole number"),
    ):
        if given is not None and not fits:
            raise HeadstockError(f"{name} has the wrong type", given=repr(given)[:80], works=works)


def _is_nested(options: object) -> bool:
    return isinstance(options, Mapping) and all(isinstance(own, Mapping) for own in options.values())


def _put_forward(offers: Iterable[Offer | Candidate | Plugin]) -> tuple[list[Candidate], list[Plugin]]:
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
