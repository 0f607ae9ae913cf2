"""The model runner: requirements, negotiation, memory, backends, weights, and then one forward per step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstock.backend import AttentionBackend
from headstock.backend import Progress as Preparation
from headstock.batch import ForwardBatch
from headstock.decision import Decision
from headstock.device import Device, torch_dtype
from headstock.errors import HeadstockError, PluginError
from headstock.kv.allocator import PageAllocator
from headstock.kv.page_table import PageTable
from headstock.kv.pool import KVPool
from headstock.layer import AttentionLayer
from headstock.models.config import ModelConfig
from headstock.models.llama import Progress, weight_bytes
from headstock.models.registry import model_class
from headstock.models.weights import WeightSource
from headstock.negotiate import negotiate
from headstock.offer import Candidate, Offer
from headstock.plugins import Observers, describe_fault, installed
from headstock.policy import Policy
from headstock.render import raise_unsolved
from headstock.runner.instances import FaultyBackend, Instance, Limits, load_instances, start_and_probe
from headstock.runner.memory import plan_memory
from headstock.runner.requirements import layer_groups, requirements


class Segment(NamedTuple):
    """One backend's share of a step: the batch it planned, and its rows of q, k, v and out (None: all)."""

    backend: AttentionBackend
    batch: ForwardBatch
    rows: slice | None = None


class ModelRunner:
    """A model, its KV cache and the backends that were chosen for it.

    `model` is a Hugging Face folder, or a ModelConfig for random weights. Everything that can be refused is refused
    before weights are read: requirements, negotiation (`policy` among `offers`, by default what is installed), the
    memory plan, loading, and a probe of every backend. A backend that fails in this and was not asked for by name is
    passed over, loudly, for the next best.

    `dtype` and `kv_dtype` are torch names or "auto"; `max_batch` rows, `max_tokens` tokens per forward, `max_context`
    tokens per request and `kv_tokens` tokens in the cache bound memory. `notices` collects what the user should know.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        max_batch: int = 32,
        max_tokens: int = 2048,
        max_context: int | None = None,
        kv_tokens: int | None = None,
        policy: Policy | None = None,
        offers: Iterable[Offer | Candidate] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        progress: Progress | None = None,
        seed: int = 0,
    ):
        self.config = model if isinstance(model, ModelConfig) else ModelConfig.from_folder(model)
        self.device = Device.open(device)
        self.dtype = self.device.default_dtype(self.config.dtype) if dtype == "auto" else dtype
        self.notices: list[str] = []
        self.max_context = self.config.max_context if max_context is None else max_context
        self.limits = Limits(max_batch, max_tokens)
        self._check_sizes()

        plugins = installed() if offers is None else []
        self.observers = Observers(plugins, self.notices.append)
        found = [candidate for plugin in plugins for candidate in plugin.candidates()] if offers is None else offers
        self.candidates = [Candidate.of(each) for each in found]
        kv = None if kv_dtype == "auto" else kv_dtype
        self._choose(policy or Policy(), kv, self._by_own_name(options or {}), kv_tokens, progress)
        self._load_model(model, progress, seed)

    def _check_sizes(self) -> None:
        rows, tokens = self.limits
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

    def _by_own_name(self, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Options by the names that their backends have themselves; those for a backend unheard of are refused."""
        own = {}
        for name, values in options.items():
            found = next((each.name for each in self.candidates if each.answers_to(name)), None)
            if found is None:
                works = ", ".join(each.name for each in self.candidates) or "nothing: no backend is installed"
                raise HeadstockError("there are options for a backend that nobody offers", given=name, works=works)
            own[found] = values
        return own

    def _choose(
        self,
        policy: Policy,
        kv_dtype: str | None,
        options: Mapping[str, Mapping[str, Any]],
        kv_tokens: int | None,
        progress: Progress | None,
    ) -> None:
        """Negotiates, and again without a backend that fails, until every chosen one has passed its probe."""

        def report(step: Preparation) -> None:
            if progress:
                progress(step.what, step.done, step.total)

        needs = requirements(
            self.config,
            device=self.device.torch.type,
            compute_capability=self.device.compute_capability,
            dtype=self.dtype,
            kv_dtype=kv_dtype,
            max_context=self.max_context,
        )
        while True:
            self.decision: Decision = negotiate(needs, self.candidates, policy)
            if not self.decision.solved:
                raise_unsolved(self.decision)
            try:
                self.roles = load_instances(
                    self.decision, self.candidates, self.config, self.device, self.limits, options
                )
                self._plan_memory(kv_tokens)
                start_and_probe(self.instances, self.device, report)
                break
            except FaultyBackend as failure:
                self._pass_over(failure, policy)
        self.notices += self.decision.notices
        self.observers.notify("on_decision", decision=self.decision)

    def _pass_over(self, failure: FaultyBackend, policy: Policy) -> None:
        """Takes a failed backend out of the field, unless the user asked for it."""
        name = failure.candidate.name
        if any(failure.candidate.answers_to(chosen) for chosen in policy.backends.values()):
            raise PluginError(str(failure), works="another backend", type="headstock doctor") from failure.error
        fault = describe_fault(failure.error, "headstock doctor")
        self.notices.append(f"{failure}; choosing again without {name}")
        self.candidates = [each.failed(fault) if each.name == name else each for each in self.candidates]

    @property
    def instances(self) -> list[Instance]:
        """The distinct instances behind the roles."""
        return list({id(instance): instance for instance in self.roles.values()}.values())

    def _plan_memory(self, kv_tokens: int | None) -> None:
        self.page_size = self.decision.page_size or 1
        groups = layer_groups(self.config)
        per_page = sum(len(layers) * self.roles[group, "extend"].bytes_per_page for group, layers in groups.items())
        self.memory = plan_memory(
            self.device,
            weights=weight_bytes(self.config, torch_dtype(self.dtype), self.device.torch),
            scratch=max(instance.bytes.scratch for instance in self.instances),
            state=sum(instance.bytes.state for instance in self.instances),
            bytes_per_page=per_page,
            page_size=self.page_size,
            wanted_tokens=self.limits.max_batch * self.max_context,
            least_tokens=1,
            kv_tokens=kv_tokens,
        )

    def _load_model(self, model: str | Path | ModelConfig, progress: Progress | None, seed: int) -> None:
        self.model = model_class(self.config)(self.config, torch_dtype(self.dtype), self.device.torch)
        if isinstance(model, ModelConfig):
            self.model.init_random(seed)
        else:
            self.model.load(WeightSource(model), progress)
        groups = layer_groups(self.config)
        allocator = PageAllocator(self.memory.num_pages)
        self.pages = PageTable(allocator, self.page_size, self.limits.max_batch, self.max_context)
        self._group_of = {index: group for group, layers in groups.items() for index in layers}
        self._layers: dict[int, AttentionLayer] = {}
        for group, layers in groups.items():
            instance = self.roles[group, "extend"]
            pool = KVPool(instance.spec, instance.layout, len(layers), self.memory.num_pages)
            self._layers |= {i: AttentionLayer(i, view) for i, view in zip(layers, pool.views, strict=True)}

    @torch.inference_mode()
    def forward(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Runs one step and returns the logits of each request's last token, [len(slots), vocab].

        `slots` are requests opened in `pages`, `tokens` the new tokens of each, one or more, which follow those cached.
        Raises OutOfPages when the cache cannot take them, RequestError beyond a request's context, and HeadstockError
        for a step that is empty, too large, or names a slot twice; nothing is run then and nothing lost.
        """
        query_lens = [len(each) for each in tokens]
        if not (len(slots) == len(set(slots)) == len(tokens) and 0 < sum(query_lens) <= self.limits.max_tokens):
            raise HeadstockError(
                "a step has distinct slots, each with its new tokens",
                given=f"slots {list(slots)} with {query_lens} tokens",
                works=f"1…{self.limits.max_tokens} tokens in all",
            )
        seq_lens = [self.pages.lengths[slot] + n for slot, n in zip(slots, query_lens, strict=True)]
        self.pages.reserve(dict(zip(slots, seq_lens, strict=True)))
        table = self.pages.rows(slots, max(seq_lens), self.device.torch)
        batch = ForwardBatch.from_lengths(query_lens, seq_lens, table, self.page_size)
        segments = self._plan(batch)
        flat = torch.tensor([token for each in tokens for token in each])
        last = None if batch.phase == "decode" else (batch.query_indptr[1:] - 1).long()
        ids = flat.to(self.device.torch, non_blocking=True)
        logits = self.model.forward(ids, batch.positions, self._attend(segments), last)
        for slot, count in zip(slots, query_lens, strict=True):
            self.pages.advance(slot, count)
        for group in segments.values():
            self.observers.notify("after_forward", batch=group[0].batch)
        return logits

    def _plan(self, batch: ForwardBatch) -> dict[str, list[Segment]]:
        """Each group's segments of a step, planned. Groups share the page table; their batches differ in the plan."""
        segments = {}
        for group in dict.fromkeys(self._group_of.values()):
            backend = self.roles[group, batch.phase].backend
            assert backend is not None, "backends are started when they are chosen"
            own = copy.copy(batch)
            self.observers.notify("before_forward", batch=own)
            backend.init_forward_metadata(own)
            backend.init_forward_metadata_in_graph(own)
            segments[group] = [Segment(backend, own)]
        return segments

    def _attend(self, segments: Mapping[str, list[Segment]]) -> Any:
        """What the model calls once per layer."""
        layers = [(self._layers[i], segments[self._group_of[i]]) for i in range(self.config.num_layers)]

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            layer, parts = layers[index]
            for backend, batch, rows in parts:
                if rows is None:
                    backend.forward(q, k, v, layer, batch, out=out)
                else:
                    backend.forward(q[rows], k[rows], v[rows], layer, batch, out=out[rows])

        return attend
