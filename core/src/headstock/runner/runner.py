"""The model runner: requirements, negotiation, memory, backends, weights, and then one forward per step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headstock.backend import AttentionBackend, Phase
from headstock.backend import Progress as Preparation
from headstock.batch import ForwardBatch
from headstock.decision import Decision
from headstock.device import Device, torch_dtype
from headstock.errors import HeadstockError, MemoryPlanError, PluginError
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
from headstock.plugins import Discovered, Observers, Plugin, installed
from headstock.policy import Policy
from headstock.render import raise_unsolved
from headstock.runner.instances import FaultyBackend, Instance, Limits, load_instances, start_and_probe
from headstock.runner.memory import plan_memory
from headstock.runner.requirements import layer_groups, requirements
from headstock.solver import answering


class Segment(NamedTuple):
    """One backend's share of a step: the batch it planned, and its rows of q, k, v and out (None: all)."""

    backend: AttentionBackend
    batch: ForwardBatch
    rows: slice | None = None


class ModelRunner:
    """A model, its KV cache and the backends that were chosen for it.

    `model` is a Hugging Face folder, or a ModelConfig for random weights. Everything that can be refused is refused
    before weights are read: requirements, negotiation (`policy` among `offers`, by default the installed plugins), the
    memory plan, loading, and a probe of every backend. A backend that fails in this, or whose workspace leaves no room
    for a cache, is passed over, loudly, for the next best in every role for which it was not asked for by name.

    Observers are called of the plugins among `offers`, and of those that candidates among them were discovered in: what
    is not offered is not heard. A plugin that only observes is offered as itself, as in `[*installed(), mine]`.

    `dtype` and `kv_dtype` are torch names or "auto"; `max_batch` rows, `max_tokens` tokens per forward, `max_context`
    tokens per request and `kv_tokens` tokens in the cache bound memory. A step of both single tokens and longer rows
    is one EXTEND segment, or with `mixed="split"` a DECODE and an EXTEND segment. `notices` collects what the user
    should know.
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
        offers: Iterable[Offer | Candidate | Plugin] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        progress: Progress | None = None,
        mixed: Literal["extend", "split"] = "extend",
        seed: int = 0,
    ):
        self.config = model if isinstance(model, ModelConfig) else ModelConfig.from_folder(model)
        self.device = Device.open(device)
        self.dtype = self.device.default_dtype(self.config.dtype) if dtype == "auto" else dtype
        self.notices: list[str] = []
        self.max_context = self.config.max_context if max_context is None else max_context
        self.mixed = mixed
        self.limits = Limits(max_batch, max_tokens, max_plans=2 if mixed == "split" else 1)
        self._check_sizes()

        self.candidates, plugins = _put_forward(installed() if offers is None else offers)
        self.observers = Observers(plugins, self.notices.append)
        kv = None if kv_dtype == "auto" else kv_dtype
        self._choose(policy or Policy(), kv, self._by_own_name(options or {}), kv_tokens, progress)
        self._load_model(model, progress, seed)

    def _check_sizes(self) -> None:
        rows, tokens, _ = self.limits
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
        last: BaseException | None = None
        while True:
            self.decision: Decision = negotiate(needs, self.candidates, policy)
            if not self.decision.solved:
                if isinstance(last, MemoryPlanError):  # nobody else can serve: less context or cache is the cure
                    raise last
                raise_unsolved(self.decision)
            try:
                self.roles = load_instances(
                    self.decision, self.candidates, self.config, self.device, self.limits, options
                )
                self._plan_memory(kv_tokens, policy)
                start_and_probe(self.instances, self.device, report)
                break
            except FaultyBackend as failure:
                self._pass_over(failure, policy)
                last = failure.error
        self.notices += self.decision.notices
        chosen = {instance.candidate.name for instance in self.instances}
        unused = [name for name in options if name not in chosen]
        self.notices += [f"the options of {name} are not used: another backend was chosen" for name in unused]
        self.observers.notify("on_decision", decision=self.decision)

    def _pass_over(self, failure: FaultyBackend, policy: Policy) -> None:
        """Takes a failed backend out of the roles that were left to negotiation; refuses where it was asked for.

        One that was named for a phase, and chosen for the other too, stays for the phase that names it: it has to fail
        in that alone to be refused.
        """
        candidate, asked = failure.candidate, self._asked_for(failure.candidate, policy)
        phases = frozenset(phase for _, phase in asked)
        remaining = failure.remains(phases)
        failed = {(failure.group, phase) for phase in failure.phases}
        if failed <= asked or remaining == candidate:  # the latter: named for the phase, but of another layer group
            if isinstance(failure.error, MemoryPlanError):
                raise failure.error
            raise PluginError(str(failure), works="another backend", type="headstock doctor") from failure.error
        but = f", but for {', '.join(sorted(phases))}, as asked for" if phases else ""
        self.notices.append(f"{failure}; choosing again without {candidate.name}{but}")
        self.candidates = [remaining if each is candidate else each for each in self.candidates]

    def _asked_for(self, candidate: Candidate, policy: Policy) -> set[tuple[str, str]]:
        """The groups and phases for which the user named this backend."""
        chosen = {(need.group, need.phase): policy.chosen(need) for need in self.decision.requirements}
        return {key for key, each in chosen.items() if each and candidate.name in answering(each[1], self.candidates)}

    @property
    def instances(self) -> list[Instance]:
        """The distinct instances behind the roles."""
        return list({id(instance): instance for instance in self.roles.values()}.values())

    def _plan_memory(self, kv_tokens: int | None, policy: Policy) -> None:
        """Plans the memory; where only workspaces are in the way, the largest that nobody asked for is at fault."""
        self.page_size = self.decision.page_size or 1
        groups = layer_groups(self.config)
        plan = partial(
            plan_memory,
            self.device,
            weights=weight_bytes(self.config, torch_dtype(self.dtype), self.device.torch),
            bytes_per_page=sum(len(own) * self.roles[name, "extend"].bytes_per_page for name, own in groups.items()),
            page_size=self.page_size,
            wanted_tokens=self.limits.max_batch * self.max_context,
            least_tokens=1,
            kv_tokens=kv_tokens,
        )
        scratch = max(instance.bytes.scratch for instance in self.instances)
        state = sum(instance.bytes.state for instance in self.instances)
        try:
            self.memory = plan(scratch=scratch, state=state)
        except MemoryPlanError as error:
            with suppress(MemoryPlanError):
                plan(scratch=0, state=0)
                instances = [(self._asked_for(each.candidate, policy), each) for each in self.instances]
                _, greedy = max(instances, key=lambda pair: (not pair[0], sum(pair[1].bytes)))
                raise FaultyBackend(greedy.candidate, error, greedy.spec.group, greedy.spec.phases) from error
            raise

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
        seq_lens = [self.pages.lengths[slot] + n for slot, n in zip(slots, query_lens, strict=True)]
        self.pages.reserve(dict(zip(slots, seq_lens, strict=True)))
        parts = self._parts(query_lens)
        batches = [self._batch(part, slots, query_lens, seq_lens) for part in parts]
        order = [row for part in parts for row in part]
        ids = torch.tensor([token for row in order for token in tokens[row]]).to(self.device.torch, non_blocking=True)
        positions = batches[0].positions if len(batches) == 1 else torch.cat([batch.positions for batch in batches])
        last = None  # of every row, which in a step of single tokens are all
        if len(ids) > len(slots):
            ends = torch.tensor([query_lens[row] for row in order]).cumsum(0) - 1
            last = ends.to(self.device.torch, non_blocking=True)
        try:
            segments = self._plan(batches)
            logits = self.model.forward(ids, positions, self._attend(segments), last)
        except BaseException as error:
            error.add_note(f"a step of {self._served_by({batch.phase for batch in batches})} failed")
            raise
        for slot, count in zip(slots, query_lens, strict=True):
            self.pages.advance(slot, count)
        for group in segments.values():
            for segment in group:
                self.observers.notify("after_forward", batch=segment.batch)
        return logits if len(parts) == 1 else logits[torch.tensor(order).argsort().to(logits.device)]

    def _parts(self, query_lens: Sequence[int]) -> list[list[int]]:
        """The rows of each segment of a step. Split, a mixed step decodes its single tokens apart from the others."""
        rows = range(len(query_lens))
        if self.mixed == "extend":
            return [list(rows)]
        parts = [[row for row in rows if query_lens[row] == 1], [row for row in rows if query_lens[row] > 1]]
        return [part for part in parts if part]

    def _batch(
        self, rows: Sequence[int], slots: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> ForwardBatch:
        slots, query_lens, seq_lens = ([each[row] for row in rows] for each in (slots, query_lens, seq_lens))
        table = self.pages.rows(slots, max(seq_lens), self.device.torch)
        return ForwardBatch.from_lengths(query_lens, seq_lens, table, self.page_size)

    def _plan(self, batches: Sequence[ForwardBatch]) -> dict[str, list[Segment]]:
        """Each group's segments of a step, planned. Groups share the page table; their batches differ in the plan."""
        segments: dict[str, list[Segment]] = {}
        for group in dict.fromkeys(self._group_of.values()):
            start, segments[group] = 0, []
            for batch in batches:
                backend = self.roles[group, batch.phase].backend
                assert backend is not None, "backends are started when they are chosen"
                own = copy.copy(batch)
                self.observers.notify("before_forward", batch=own)
                backend.init_forward_metadata(own)
                backend.init_forward_metadata_in_graph(own)
                rows = None if len(batches) == 1 else slice(start, start := start + batch.num_tokens)
                segments[group].append(Segment(backend, own, rows))
        return segments

    def _served_by(self, phases: set[Phase]) -> str:
        candidates = [each.candidate for (_, role), each in self.roles.items() if role in phases]
        return " and ".join(dict.fromkeys(f"{each.name} ({each.source})" for each in candidates))

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


def _put_forward(offers: Iterable[Offer | Candidate | Plugin]) -> tuple[list[Candidate], list[Plugin]]:
    """What takes part in negotiation, and the plugins behind it, each once."""
    candidates: list[Candidate] = []
    plugins: list[Plugin] = []
    for each in offers:
        if isinstance(each, Plugin):
            plugins.append(each)
            candidates += each.candidates()
        else:
            candidates.append(Candidate.of(each))
    plugins += [each.plugin for each in candidates if isinstance(each, Discovered)]
    return candidates, list({id(plugin): plugin for plugin in plugins}.values())
