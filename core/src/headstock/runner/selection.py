"""The backends of one runner: negotiated, loaded, planned for and probed, and chosen again without one that fails."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from headstock.backend import Report
from headstock.decision import Decision
from headstock.device import Device, torch_dtype
from headstock.errors import MemoryPlanError, PluginError
from headstock.kv.window import WindowPages
from headstock.models.config import ModelConfig
from headstock.models.shapes import weight_bytes
from headstock.negotiate import negotiate
from headstock.offer import Candidate
from headstock.policy import Policy
from headstock.render import raise_unsolved
from headstock.requirement import Requirement
from headstock.runner.instances import FaultyBackend, Instance, Roles, load_instances, start_and_probe
from headstock.runner.latent import expand_from, expansion_bytes
from headstock.runner.limits import Limits
from headstock.runner.memory import MemoryPlan, WindowPlan, graph_bytes, plan_memory
from headstock.runner.requirements import layer_groups
from headstock.solver import answering


class Selection:
    """Who serves which role of a model, and on what memory.

    A backend that fails to load, to start or to pass its probe, or whose workspace leaves no room for a cache, is
    passed over for the next best in every role for which `policy` does not name it; each `notices` of it. Making one
    raises NegotiationError where nobody can serve, MemoryPlanError where the cache does not fit, and PluginError for a
    backend that was named and fails.

    `decision` is what negotiation came to, `roles` has who serves by (group, role), `memory` is the plan, and
    `candidates` are those that remain. `options` are by the names that backends have themselves.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        needs: Sequence[Requirement],
        candidates: Sequence[Candidate],
        policy: Policy,
        limits: Limits,
        options: Mapping[str, Mapping[str, Any]],
        kv_tokens: int | None,
        report: Report,
    ):
        self.config, self.device, self.limits, self.policy = config, device, limits, policy
        self.shapes = {group: config.layers[layers[0]] for group, layers in layer_groups(config).items()}
        self.candidates = list(candidates)
        self.notices: list[str] = []
        last: BaseException | None = None
        while True:
            self.decision: Decision = negotiate(needs, self.candidates, policy)
            if not self.decision.solved:
                if isinstance(last, MemoryPlanError):  # nobody else can serve: less context or cache is the cure
                    raise last
                raise_unsolved(self.decision)
            try:
                self.roles: Roles = load_instances(self.decision, self.candidates, config, device, limits, options)
                self._start(kv_tokens, report)
                break
            except FaultyBackend as failure:
                self._pass_over(failure)
                last = failure.error
        self.notices += self.decision.notices
        self.notices += self.decision.unused(options, limits.max_batch)

    @property
    def instances(self) -> list[Instance]:
        """The distinct instances behind the roles."""
        each = (instance for servers in self.roles.values() for instance in servers.instances)
        return list({id(instance): instance for instance in each}.values())

    @property
    def expand_from(self) -> int | None:
        """New tokens of a row from which its keys are expanded, where latent attention is served in that form."""
        served = [group for group, role in self.roles if role == "expand"]
        if not served:
            return None
        if any((group, "extend") not in self.roles for group in served):
            return 2  # one new token is decoded
        return self.policy.expand_from or max(
            self._crossover(group) or expand_from(self.shapes[group]) for group in served
        )

    def _crossover(self, group: str) -> int:
        """From how many new tokens on expanding was faster, for any two who serve the forms; 0 if not measured."""
        names = ([each.candidate.name for each in self.roles[group, role].instances] for role in ("extend", "expand"))
        size, layout = (need := self.decision.cached(group)).page_size, need.kv_layout
        pairs = {(group, *pair, size, layout) for pair in itertools.product(*names)}
        found = {pair: each.tokens for each in self.policy.crossovers if (pair := each[:5]) in pairs}
        return max(found.values()) if found.keys() == pairs else 0

    def _start(self, kv_tokens: int | None, report: Report) -> None:
        """Makes the instances ready to run. Raises FaultyBackend for what fails."""
        self.memory = self._plan_memory(kv_tokens)
        start_and_probe(self.instances, self.device, report)

    def _pass_over(self, failure: FaultyBackend) -> None:
        """Takes a failed backend out of the roles that were left to negotiation; refuses where it was asked for.

        One that was named for a phase, and chosen for the other too, stays for the phase that names it: it has to fail
        in that alone to be refused.
        """
        candidate, asked = failure.candidate, self._asked_for(failure.candidate)
        phases = frozenset(phase for _, phase in asked)
        remaining = failure.remains(phases)
        failed = {(failure.group, phase) for phase in failure.phases}
        if failed <= asked or remaining == candidate:  # the latter: named for the phase, but of another layer group
            if isinstance(failure.error, MemoryPlanError):
                raise failure.error
            raise PluginError(str(failure), works="another backend", type=failure.look) from failure.error
        but = f", but for {', '.join(sorted(phases))}, as asked for" if phases else ""
        self.notices.append(f"{failure}; choosing again without {candidate.name}{but}")
        self.candidates = [remaining if each is candidate else each for each in self.candidates]

    def _asked_for(self, candidate: Candidate) -> set[tuple[str, str]]:
        """The groups and phases for which the user named this backend, be it for some batch sizes."""
        asked: set[tuple[str, str]] = set()
        for need in self.decision.requirements:
            chosen = self.policy.chosen(need)
            names = [name for _, name in self.policy.scheduled(need)] or ([chosen[1]] if chosen else [])
            if any(candidate.name in answering(name, self.candidates) for name in names):
                asked.add((need.group, need.phase))
        return asked

    def _plan_memory(self, kv_tokens: int | None) -> MemoryPlan:
        """Plans the memory; where only workspaces are in the way, the largest that nobody asked for is at fault."""
        config, need = self.config, self.decision.requirements[0]
        page_size = self.decision.page_size or 1
        sizes = self._bytes_per_page()
        rows, tokens, width = self.limits.max_batch, self.limits.max_tokens, -(-need.max_context // page_size)
        most = partial(WindowPages.enough, page_size=page_size, max_requests=rows, max_tokens=tokens)
        plan = partial(
            plan_memory,
            self.device,
            weights=weight_bytes(config, torch_dtype(need.dtype), self.device.torch),
            bytes_per_page=sizes.pop(None, 0),
            windows={window: WindowPlan(most(window), size) for window, size in sizes.items() if window},
            page_size=page_size,
            wanted_tokens=self.limits.max_batch * need.max_context,
            least_tokens=1,
            kv_tokens=kv_tokens,
            graphs=graph_bytes(config, torch_dtype(need.dtype).itemsize, self._captured_sizes(), width),
            expanded_page=page_size * _expanded_numbers(config) * torch_dtype(need.kv_dtype).itemsize,
            expansion=self._expansion(min(need.max_context, kv_tokens or need.max_context)),
        )
        scratch = max(instance.bytes.scratch for instance in self.instances)
        state = sum(instance.bytes.state for instance in self.instances)
        try:
            return plan(scratch=scratch, state=state)
        except MemoryPlanError as error:
            with suppress(MemoryPlanError):
                plan(scratch=0, state=0)
                instances = [(self._asked_for(each.candidate), each) for each in self.instances]
                _, greedy = max(instances, key=lambda pair: (not pair[0], sum(pair[1].bytes)))
                raise FaultyBackend(greedy.candidate, error, greedy.spec.group, greedy.spec.phases) from error
            raise

    def _expansion(self, context: int) -> int:
        """Bytes that a step takes to expand latent vectors; rows hold at most `context` tokens."""
        shapes = (self.shapes[group] for group, role in self.roles if role == "expand")
        each = (
            expansion_bytes(
                shape, context=context, max_batch=self.limits.max_batch, max_tokens=self.limits.max_tokens,
                least=self.expand_from or 1, size=torch_dtype(self.decision.requirements[0].dtype).itemsize,
            )
            for shape in shapes
        )  # fmt: skip
        return max(each, default=0)

    def _captured_sizes(self) -> list[int]:
        """The rows of the decode steps that will be captured."""
        return sorted({bucket.batch for instance in self.instances for bucket in instance.spec.graph_buckets})

    def _bytes_per_page(self) -> dict[int | None, int]:
        """Bytes of a page over all layers that have this window, or none."""
        sizes: dict[int | None, int] = {}
        for group, layers in layer_groups(self.config).items():
            instance = self.roles[group, "decode"].first
            window = instance.spec.window
            sizes[window] = sizes.get(window, 0) + len(layers) * instance.bytes_per_page
        return sizes


def _expanded_numbers(config: ModelConfig) -> int:
    """The keys and values of a token in all layers that cache a latent vector in their place."""
    return sum(shape.num_heads * (shape.head_dim + shape.v_head_dim) for shape in config.layers if shape.latent)
