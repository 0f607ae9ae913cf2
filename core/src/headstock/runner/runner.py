"""The model runner: requirements, negotiation, memory, backends, weights, and then one forward per step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headstock.backend import Progress as Preparation
from headstock.device import Device, torch_dtype
from headstock.errors import HeadstockError
from headstock.fusing import fusing
from headstock.kv.allocator import PageAllocator
from headstock.kv.page_table import PageTable
from headstock.kv.pool import KVPool
from headstock.kv.window import WindowPages
from headstock.layer import AttentionLayer
from headstock.load import own_options
from headstock.models.config import ModelConfig
from headstock.models.decoder import Progress
from headstock.models.registry import model_class
from headstock.models.weights import WeightSource
from headstock.offer import Candidate, Offer
from headstock.plugins import Observers, Plugin, installed
from headstock.policy import GRAPH_SIZES, Policy
from headstock.runner.arguments import check_sizes, check_types, put_forward
from headstock.runner.captured import CaptureReport, Done
from headstock.runner.graph import GraphRunner, decode_graphs
from headstock.runner.instances import Instance
from headstock.runner.levels import Levels, Shared
from headstock.runner.limits import Limits
from headstock.runner.requirements import layer_groups, requirements
from headstock.runner.selection import Selection
from headstock.runner.step import Mixed, Steps


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
    tokens and longer rows is one EXTEND segment, or with `mixed="split"` a DECODE and an EXTEND segment; "auto" splits
    on a CPU, and where another backend decodes. Decode steps are captured as device graphs of `graph_sizes` rows, by
    default a dozen sizes, and always of `max_batch`; `graphs` holds them, or is None. `notices` collects what the user
    should know.
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
        mixed: Mixed | Literal["auto"] = "auto",
        graph_sizes: Sequence[int] = GRAPH_SIZES,
        seed: int = 0,
    ):
        self.config = model if isinstance(model, ModelConfig) else ModelConfig.from_folder(model)
        self.device = Device.open(device)
        dtype = str(dtype).removeprefix("torch.")
        self.dtype = self.device.default_dtype(self.config.dtype) if dtype == "auto" else dtype
        self.notices: list[str] = []
        self.max_context = self.config.max_context if max_context is None else max_context
        check_types(policy, options, kv_tokens)
        check_sizes(self.config, max_batch, max_tokens, self.max_context, mixed)
        policy = policy or Policy()
        self.limits = Limits.of(policy, self.device, max_batch, max_tokens, mixed, graph_sizes)

        candidates, plugins = put_forward(installed() if offers is None else offers)
        self.observers = Observers(plugins, self.notices.append)
        with self.device.active(), torch.inference_mode(False):  # steps write to what this makes, outside of that mode
            self._choose(candidates, policy, kv_dtype, options or {}, kv_tokens, progress)
            self.mixed: Mixed = self._split() if mixed == "auto" else mixed
            self._load_model(model, progress, seed)
            self._make_cache(always_share=policy.cascade == "on")
            self.graphs = self._capture(progress)

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
            graph=policy.graph,
            cascade=policy.cascade,
        )
        own = own_options(options, candidates)
        chosen = Selection(self.config, self.device, needs, candidates, policy, self.limits, own, kv_tokens, report)
        self.decision, self.roles, self.memory = chosen.decision, chosen.roles, chosen.memory
        self.page_size, self.candidates = self.memory.page_size, chosen.candidates
        self.expand_from = chosen.expand_from
        self.instances: list[Instance] = chosen.instances
        self.notices += chosen.notices
        self.observers.notify("on_decision", decision=self.decision)

    def _load_model(self, model: str | Path | ModelConfig, progress: Progress | None, seed: int) -> None:
        if fault := fusing(self.device.torch).fault:
            self.notices.append(fault)
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
            instance = self.roles[group, "decode"].first
            window = instance.spec.window
            num_pages = memory.windows[window].num_pages if window else table_pages
            assert instance.layout is not None, "what decodes reads a cache"
            pool = KVPool(instance.spec, instance.layout, len(indices), num_pages)
            layers |= {i: AttentionLayer(i, view) for i, view in zip(indices, pool.views, strict=True)}
        decoding = {group: self.roles[group, "decode"] for group in groups}
        levels = Levels(self.pages, self.device, decoding, always_share)
        self.steps = Steps(
            self.pages, levels, self.device, self.roles, groups, layers, self.observers, self.mixed, self.expand_from
        )  # fmt: skip

    def _split(self) -> Mixed:
        """How mixed steps run where nobody says: a row that decodes stays with the backend that decodes.

        On a CPU they are split in any case: with one backend for both they then took 0.79 of the time.
        """
        if self.device.torch.type == "cpu":
            return "split"
        for group in layer_groups(self.config):
            served = [self.roles[group, role] for role in ("extend", "decode") if (group, role) in self.roles]
            if len({id(instance) for servers in served for instance in servers.instances}) > 1:
                return "split"
        return "extend"

    def _capture(self, progress: Progress | None) -> GraphRunner | None:
        """Captures the decode steps, if their backends can be, and tells what it cost more than was planned."""
        if not any(instance.spec.graph_buckets for instance in self.instances):
            return None
        graphs = decode_graphs(self.steps, self.model.forward)

        def tell(report: CaptureReport) -> None:
            if progress:
                progress("capturing graphs", len(graphs.reports), len(graphs.static.buckets))

        self.observers.notify("on_capture", report=graphs.capture(tell))
        self.notices += [f"{each.failure}: such steps run eagerly" for each in graphs.reports if each.failure]
        if (used := graphs.num_bytes) > self.memory.graphs:
            planned = f"{self.memory.graphs >> 20} MiB were planned for"
            meanwhile = "on a GPU, what other processes took meanwhile counts too"  # free memory is all a driver tells
            self.notices.append(f"the decode graphs took {used >> 20} MiB, {planned}; {meanwhile}")
        return graphs

    def forward(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Runs one step as `step` does, and returns its logits, [len(slots), vocab], to keep."""
        done = self.step(slots, tokens)
        return done.logits.clone() if done.sampled else done.logits

    def step(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Done:
        """Runs one step, by a graph if one holds it, for the logits of each request's last token.

        `slots` are requests opened in `pages`, `tokens` the new tokens of each, one or more, which follow those cached.
        Raises OutOfPages when the cache cannot take them, RequestError beyond a request's context, and HeadstockError
        for a step that is empty, too large, or names a slot twice; nothing is run then and nothing lost. What a backend
        raises passes, with a note of whose step it was.
        """
        query_lens, flat = list(map(len, tokens)), list(chain.from_iterable(tokens))
        distinct = len(slots) == len(set(slots)) == len(tokens)
        if not (distinct and all(query_lens) and 0 < len(flat) <= self.limits.max_tokens):
            raise HeadstockError(
                "a step has distinct slots, each with its new tokens",
                given=f"slots {list(slots)} with {query_lens} tokens",
                works=f"1 or more of each, and 1…{self.limits.max_tokens} in all",
            )
        if not 0 <= min(flat) <= max(flat) < self.config.vocab_size:
            works = f"0…{self.config.vocab_size - 1}, the model's vocabulary"
            raise HeadstockError("a token is not in the vocabulary", given=f"{min(flat)}…{max(flat)}", works=works)
        decodes = len(flat) == len(slots)
        seq_lens = self.pages.grow(slots, query_lens)
        with self.device.active():
            replayed = self._replay(self.graphs, slots, seq_lens, flat) if self.graphs and decodes else None
            done = replayed or self._eagerly(slots, tokens)
        self.pages.commit(slots, seq_lens)
        return done

    def _replay(
        self, graphs: GraphRunner, slots: Sequence[int], seq_lens: Sequence[int], tokens: Sequence[int]
    ) -> Done | None:
        try:
            return graphs.step(slots, seq_lens, tokens, self._shared(graphs, slots) if graphs.levels else None)
        except BaseException as error:
            bucket = graphs.fitting(len(slots))
            self._note(error, [1] * (bucket.batch if bucket else len(slots)))
            raise

    def _shared(self, graphs: GraphRunner, slots: Sequence[int]) -> Shared | None:
        """What the rows share, as the graph that fits them reads it."""
        bucket = graphs.fitting(len(slots))
        if bucket is None or not bucket.levels:
            return None
        return self.steps.levels.find(slots, bucket.levels, bucket.batch)

    def _eagerly(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Done:
        try:
            step = self.steps.make(slots, tokens)
            segments = self.steps.plan(step)  # not in inference mode: a replay's plan may write to what this one makes
            with torch.inference_mode():
                logits = self.model.forward(step.ids, step.positions, self.steps.attend(segments), step.last)
                done = Done(step.in_order_given(logits))
            for group in segments.values():
                for segment in group:
                    self.observers.notify("after_forward", batch=segment.batch)
            return done
        except BaseException as error:
            self._note(error, list(map(len, tokens)))
            raise

    def _note(self, error: BaseException, query_lens: Sequence[int]) -> None:
        """Adds to an error whose step of such rows, padding included, it was."""
        error.add_note(f"a step of {self.steps.served_by(query_lens)} failed")
