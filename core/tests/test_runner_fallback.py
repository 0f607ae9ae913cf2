"""Who runs when a chosen backend fails: the next best where negotiation chose it, nobody where it was asked for."""

from __future__ import annotations

from types import ModuleType

import pydantic
import pytest

from headstock import ANY, AttentionBackend, Capabilities, ModelRunner, Offer, WorkspaceBytes, hookimpl
from headstock.device import Device
from headstock.errors import MemoryPlanError, PluginError
from headstock.models.config import ModelConfig
from headstock.negotiate import Policy
from headstock.plugins import Plugin

RAW = {
    "model_type": "qwen2", "vocab_size": 11, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "use_sliding_window": True,
    "sliding_window": 5,
}  # fmt: skip
ONE_GROUP = ModelConfig.from_hf(RAW | {"max_window_layers": 2})
TWO_GROUPS = ModelConfig.from_hf(RAW | {"max_window_layers": 1})
PREFERRED = 9.0


class Mean(AttentionBackend):
    """Finite numbers, which is all that a probe wants."""

    def init_forward_metadata(self, batch):
        batch.metadata = batch.phase

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        out.fill_(0.5)


class FailsInExtend(Mean):
    def init_forward_metadata(self, batch):
        if batch.phase == "extend":
            raise RuntimeError("no prefill kernel")


class FailsInDecode(Mean):
    def init_forward_metadata(self, batch):
        if batch.phase == "decode":
            raise RuntimeError("no decode kernel")


class FailsInConstructor(Mean):
    def __init__(self, spec, workspace):
        raise RuntimeError("built for another torch")


class FailsInConstructorForExtend(Mean):
    def __init__(self, spec, workspace):
        if "extend" in spec.phases:
            raise RuntimeError("no prefill kernel")
        super().__init__(spec, workspace)


class FailsWithoutWindow(Mean):
    def __init__(self, spec, workspace):
        if spec.window is None:
            raise RuntimeError("made for windows")
        super().__init__(spec, workspace)


class Greedy(Mean):
    @classmethod
    def workspace_bytes(cls, spec):
        return WorkspaceBytes(state=1 << 60)


def offer(backend=Mean, name="plain", preference=0.0, **fields):
    can = Capabilities(
        devices={"cpu"}, phases={"extend", "decode"}, attention={"paged"}, dtypes={"float32"}, head_dims=ANY,
        page_sizes=ANY, kv_layouts={"nhd"}, sliding_window=True, preference=preference, host_lengths="exact",
    )  # fmt: skip
    return Offer(name=name, backend=backend, capabilities=can, **fields)


def runner(*offers, model=ONE_GROUP, backends=None, **given):
    sizes = {"max_batch": 2, "max_tokens": 8, "kv_tokens": 64, "dtype": "float32"}
    return ModelRunner(model, offers=offers, policy=Policy(backends=backends or {}), **sizes | given)


def served(ours):
    return {f"{group}/{role}": servers.first.candidate.name for (group, role), servers in ours.roles.items()}


# A backend named for one phase and chosen for the other too


@pytest.mark.parametrize("backend", [FailsInExtend, FailsInConstructorForExtend])
@pytest.mark.parametrize("named", ["bad", "worse"])
def test_what_was_named_for_decode_and_fails_in_extend_stays_for_decode(backend, named):
    bad = offer(backend, "bad", PREFERRED, aliases=("worse",))
    ours = runner(bad, offer(), backends={"decode": named})
    assert served(ours) == {"all/extend": "plain", "all/decode": "bad"}
    assert ours.roles["all", "decode"].first.spec.phases == {"decode"}
    [notice] = ours.notices
    assert "the backend bad (in this process) failed: RuntimeError: no prefill kernel" in notice
    assert "choosing again without bad, but for decode, as asked for" in notice
    slot = ours.pages.open()
    ours.forward([slot], [[1, 2, 3]])
    assert ours.forward([slot], [[4]]).isfinite().all()


@pytest.mark.parametrize("backend", [FailsInDecode, FailsInConstructor])
def test_what_was_named_for_decode_and_fails_in_decode_is_refused(backend):
    with pytest.raises(PluginError, match=r"the backend bad .* failed: RuntimeError: .*would work: another backend$"):
        runner(offer(backend, "bad", PREFERRED), offer(), backends={"decode": "bad"})


def test_what_nobody_named_and_fails_in_one_phase_is_passed_over_for_both():
    assert set(served(runner(offer(FailsInExtend, "bad", PREFERRED), offer())).values()) == {"plain"}


def test_what_was_named_for_one_group_and_fails_in_another_is_refused_rather_than_tried_for_ever():
    bad = offer(FailsWithoutWindow, "bad", PREFERRED)
    with pytest.raises(PluginError, match="made for windows"):
        runner(bad, offer(), model=TWO_GROUPS, backends={"window-5/extend": "bad", "window-5/decode": "bad"})
    assert set(served(runner(bad, offer(), model=TWO_GROUPS)).values()) == {"plain"}


# A workspace that leaves no room for a cache


def test_a_workspace_that_leaves_no_room_passes_the_turn_to_the_next_backend():
    ours = runner(offer(Greedy, "greedy", PREFERRED), offer())
    assert set(served(ours).values()) == {"plain"}
    [notice] = ours.notices
    assert "the backend greedy (in this process) failed: the KV cache" in notice
    assert "choosing again without greedy" in notice


def test_where_two_workspaces_do_not_fit_together_the_one_that_was_asked_for_stays(monkeypatch):
    monkeypatch.setattr(Device, "free_memory", lambda self: 100 << 20)
    large, small = (offer(type("Sized", (Mean,), {"workspace_bytes": of(mib)}), f"of-{mib}") for mib in (60, 50))
    small = offer(small.backend, small.name, PREFERRED)
    ours = runner(large, small, offer(preference=5.0), backends={"decode": "of-60"})
    assert served(ours) == {"all/extend": "plain", "all/decode": "of-60"}
    assert "choosing again without of-50" in ours.notices[0]


def of(mib):
    return classmethod(lambda cls, spec: WorkspaceBytes(state=mib << 20))


@pytest.mark.parametrize("named", [{"all": "greedy"}, {"decode": "greedy"}])
def test_a_workspace_of_a_backend_asked_for_is_refused_with_the_sizes(named):
    with pytest.raises(MemoryPlanError, match="GiB"):
        runner(offer(Greedy, "greedy"), offer(), backends=named)


def test_where_nobody_else_can_serve_the_sizes_are_told():
    with pytest.raises(MemoryPlanError, match="GiB"):
        runner(offer(Greedy, "greedy"))


def test_a_cache_that_fits_beside_no_workspace_is_nobodys_fault():
    with pytest.raises(MemoryPlanError, match="does not fit"):
        runner(offer(Greedy, "greedy", PREFERRED), offer(), kv_tokens=10**15)


# What the user is told, and who listens


def test_options_for_a_backend_that_was_not_chosen_are_told():
    class Options(pydantic.BaseModel):
        speed: int = 0

    given, bad = {"Worse": {"speed": 1}}, offer(name="bad", aliases=("worse",), options=Options)
    ours = runner(bad, offer(preference=PREFERRED), options=given)
    assert ours.notices == ["the options of bad are not used: another backend was chosen"]


def watcher(name, seen, offers=()):
    """A plugin that notes each decision, and what it offers."""
    module = ModuleType(name)

    def on_decision(decision):
        seen.append(name)

    module.on_decision = hookimpl(on_decision)
    return Plugin(name, f"{name}-dist", "1.0", name, tuple(offers), ("on_decision",), implementation=module)


def test_the_plugins_behind_what_is_offered_are_heard_once():
    seen = []
    both, only = watcher("both", seen, [offer(), offer(name="other")]), watcher("only", seen)
    runner(*both.candidates())
    assert seen == ["both"]
    runner(offer(name="mine"), both, only)
    assert seen == ["both", "both", "only"]
    runner(offer(name="mine"))
    assert len(seen) == 3


def test_a_step_that_fails_carries_a_note_of_whose_it_is():
    class Flaky(Mean):
        def forward(self, q, k, v, layer, batch, *, out, lse=None):
            if batch.num_tokens == 4:
                raise SystemExit("no such instruction")
            super().forward(q, k, v, layer, batch, out=out, lse=lse)

    ours = runner(offer(Flaky, "flaky"), offer(preference=PREFERRED), backends={"extend": "flaky"})
    with pytest.raises(SystemExit, match="no such instruction") as caught:
        ours.forward([ours.pages.open()], [[1, 2, 3, 4]])
    assert caught.value.__notes__ == ["a step of flaky (in this process) failed"]
