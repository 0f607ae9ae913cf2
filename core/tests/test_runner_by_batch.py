"""A role served by batch size: who serves which rows, eagerly and in graphs, on what memory, and who when one fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from headstock import GraphFallback, ModelRunner, Offer, WorkspaceBytes
from headstock.backend import GraphBucket
from headstock.cli.options import Choices, Limits
from headstock.cli.settings import Settings
from headstock.cli.summary import tell_choice
from headstock.decision import Decision
from headstock.engine.engine import Engine
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.errors import NegotiationError, PluginError
from headstock.models.config import ModelConfig
from headstock.negotiate import Measurement, negotiate
from headstock.policy import Policy
from headstock.runner.requirements import requirements
from headstock.testing.specimen import CAPABILITIES, LATENT, Specimen

pytestmark = pytest.mark.usefixtures("one_thread")

RAW = {
    "model_type": "qwen2", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LATENT_RAW = {
    "model_type": "deepseek_v3", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "moe_intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "max_position_embeddings": 64, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "q_lora_rank": 20, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CONFIGS = {
    "full": ModelConfig.from_hf(RAW),
    "windows": ModelConfig.from_hf(RAW | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "latent": ModelConfig.from_hf(LATENT_RAW),
}
SIZES = {"max_batch": 4, "max_tokens": 16, "kv_tokens": 200, "dtype": "float32", "graph_sizes": (1, 2)}


class Noting(Specimen):
    """A backend that notes each batch it plans: graph, phase, rows, levels of shared prefixes."""

    def __init__(self, spec, workspace):
        super().__init__(spec, workspace)
        self.seen = []

    def init_forward_metadata(self, batch):
        self.seen.append((batch.graph, batch.phase, batch.num_reqs, len(batch.shared_levels)))
        super().init_forward_metadata(batch)

    @classmethod
    def workspace_bytes(cls, spec):
        return WorkspaceBytes(scratch=1000 * spec.max_batch, state=10 * spec.max_batch)


def offer(name, backend=Noting, **fields):
    records = (CAPABILITIES, LATENT)
    return Offer(name=name, backend=backend, capabilities=tuple(each.model_copy(update=fields) for each in records))


def measured(config="full", most=2):
    """Of two backends "few" is the quicker one at decoding up to `most` rows, "many" at everything else."""
    found = []
    for need in requirements(CONFIGS[config], device="cpu", dtype="float32"):
        size, layout = (4, "latent" if need.attention == "mla" else "nhd") if need.cached else (None, None)
        sizes = [(most, 1, 2), (None, 4, 1)] if need.role == "decode" else [(None, 2, 1)]
        for rows, few, many in sizes:
            for name, seconds in (("few", few), ("many", many)):
                found.append(Measurement(need.group, need.role, name, size, layout, seconds * 1e-3, rows))
    return tuple(found)


def by_batch(config="full", most=2, **fields):
    return Policy(**{"page_size": 4, "cascade": "off", "profile": measured(config, most), "by_batch": True} | fields)


def schedule(most=2, **fields):
    return Policy(schedules={"all/decode": ((most, "few"), (None, "many"))}, page_size=4, **fields)


def runner(policy, *offers, config="full", **given):
    offers = offers or (offer("few"), offer("many"))
    return ModelRunner(CONFIGS[config], offers=offers, policy=policy, **SIZES | given)


def decoding(ours, group="all"):
    """The instances that decode, by name."""
    return {each.candidate.name: each for each in ours.roles[group, "decode"].instances}


def serve(ours, byte_vocabulary, prompts, tokens=12):
    """The tokens of these prompts, which come and go, so that steps have all numbers of rows."""
    with Engine(ours, Tokenizer(byte_vocabulary), check=True) as engine:
        numbers = [
            engine.add_request(prompt, SamplingParams(max_tokens=tokens + 3 * n)) for n, prompt in enumerate(prompts)
        ]
        done = {}
        while engine.busy:
            done |= {out.request: out.completion for out in engine.step() if out.completion}
    return [done[number].tokens for number in numbers]


PROMPTS = [[(3 * i + j * j) % 97 for j in range(n)] for i, n in enumerate((3, 17, 9, 12, 2))]


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("config", CONFIGS)
def test_an_engine_gives_the_tokens_of_one_backend_and_each_serves_its_sizes(config, graph, byte_vocabulary):
    ours = runner(by_batch(config, graph=graph), config=config)
    one = runner(Policy(graph="off", cascade="off", page_size=4), offer("one"), config=config)
    assert (ours.graphs is not None, ours.notices) == (graph == "on", [])
    for instance in ours.instances:
        del instance.backend.seen[:]  # probes and captures
    assert serve(ours, byte_vocabulary, PROMPTS) == serve(one, byte_vocabulary, PROMPTS)
    for group in ours.steps.groups:
        seen = {name: each.backend.seen for name, each in decoding(ours, group).items()}
        assert {phase for _, phase, *_ in seen["few"]} == {"decode"}
        rows = {name: {n for kind, phase, n, _ in own if phase == "decode" and (kind == "replay") == (graph == "on")}
                for name, own in seen.items()}  # fmt: skip
        assert rows == {"few": {1, 2}, "many": {4} if graph == "on" else {3, 4}}
        eagerly = {name: {n for kind, phase, n, _ in own if phase == "decode" and kind is None}
                   for name, own in seen.items()}  # fmt: skip
        assert eagerly["few"] <= {1, 2}, "beside prompts, decoding runs eagerly"
        assert eagerly["many"] <= {3, 4}
        buckets = {
            name: [bucket.batch for bucket in each.spec.graph_buckets] for name, each in decoding(ours, group).items()
        }
        assert buckets == ({"few": [1, 2], "many": [4]} if graph == "on" else {"few": [], "many": []})
    assert not (ours.graphs and ours.graphs.fallbacks)


def test_a_size_between_captured_ones_is_served_by_whoever_serves_the_captured_one():
    ours = runner(by_batch(most=3, graph="on"), graph_sizes=(2, 4))
    slots = [ours.pages.open() for _ in range(3)]
    ours.forward(slots, [[1, 2]] * 3)
    few, many = (decoding(ours)[name].backend.seen for name in ("few", "many"))
    del few[:], many[:]
    ours.forward(slots, [[1]] * 3)
    assert (few, many) == ([], [("replay", "decode", 4, 0)])


def test_memory_is_the_largest_scratch_and_all_states_of_every_instance():
    ours = runner(by_batch(graph="on"))
    assert {name: each.spec.max_batch for name, each in decoding(ours).items()} == {"few": 2, "many": 4}
    assert (ours.memory.scratch, ours.memory.state) == (4000, 60)
    assert len({each.backend.workspace.scratch.data_ptr() for each in ours.instances}) == 1
    assert len({each.backend.workspace.state.data_ptr() for each in ours.instances}) == 2


def test_who_serves_more_rows_than_there_can_be_is_not_loaded():
    ours = runner(by_batch(), max_batch=2)
    assert {each.spec.phases for each in ours.instances} == {frozenset({"decode"}), frozenset({"extend"})}
    lone = runner(by_batch(backends={"extend": "few"}), max_batch=2)
    assert [each.candidate.name for each in lone.instances] == ["few"]
    assert len(lone.decision.choice("all", "decode").winners) == 2


def test_a_mixed_step_is_split_on_a_cpu_and_where_another_backend_decodes_some_rows(monkeypatch):
    assert runner(by_batch()).mixed == runner(Policy(page_size=4)).mixed == "split"
    ours = [runner(by_batch()), runner(Policy(page_size=4))]
    for each in ours:
        monkeypatch.setattr(each, "device", replace(each.device, torch=torch.device("meta")))
    assert [each._split() for each in ours] == ["split", "extend"]


# Prefixes that rows share


@pytest.mark.parametrize("graph", ["off", "on"])
def test_only_the_backend_that_reads_shared_prefixes_once_is_told_of_them(graph, byte_vocabulary):
    common = [7 * i % 97 for i in range(20)]
    prompts = [[*common, n, n + 1] for n in range(4)]
    for few, many in ((True, False), (False, True)):
        ours = runner(schedule(graph=graph, cascade="auto"), offer("few", cascade=few), offer("many", cascade=many))
        ours.steps.levels.always = True
        one = runner(Policy(graph="off", cascade="off", page_size=4), offer("one"))
        tokens = []
        for each in (ours, one):
            with Engine(each, Tokenizer(byte_vocabulary)) as engine:  # so that the common pages are cached
                engine.add_request(common, SamplingParams(max_tokens=1))
                engine.step()
                numbers = [engine.add_request(p, SamplingParams(max_tokens=9 + 3 * n)) for n, p in enumerate(prompts)]
                done = {}
                while engine.busy:
                    done |= {out.request: out.completion for out in engine.step() if out.completion}
            tokens.append([done[number].tokens for number in numbers])
        assert tokens[0] == tokens[1]
        told = {
            name: {
                (n, levels) for kind, phase, n, levels in each.backend.seen if (kind, phase) != ("capture", "decode")
            }
            for name, each in decoding(ours).items()
        }
        assert ((2, 1) in told["few"], (4, 1) in told["many"]) == (few, many)
        assert all(levels == 0 for name, able in (("few", few), ("many", many)) if not able for _, levels in told[name])
        if ours.graphs:
            assert not ours.graphs.fallbacks
            wanted = {2: few, 4: many}
            assert {b.batch for b in ours.graphs.static.buckets if b.levels} == {n for n in wanted if wanted[n]}


def test_whoever_serves_a_padded_size_decides_whether_its_rows_read_prefixes_once(byte_vocabulary):
    """Three rows are replayed as four, by the backend for four, which declares cascade."""
    policy = schedule(most=3, graph="on", cascade="auto")
    ours = runner(policy, offer("few", cascade=False), offer("many"), graph_sizes=(2, 4))
    ours.steps.levels.always = True
    common = [7 * i % 97 for i in range(20)]
    with Engine(ours, Tokenizer(byte_vocabulary)) as engine:
        engine.add_request(common, SamplingParams(max_tokens=1))
        engine.step()
        for n in range(3):
            engine.add_request([*common, n, n + 1], SamplingParams(max_tokens=6))
        while engine.busy:
            engine.step()
    assert set(ours.graphs.replays) == {GraphBucket(4, 1, 1)}
    assert decoding(ours)["many"].backend.seen[-1] == ("replay", "decode", 4, 1)


# When one of them fails


class Failing(Noting):
    """Fails to decode its probe, a batch of one row without a graph."""

    def init_forward_metadata(self, batch):
        if batch.phase == "decode" and batch.graph is None:
            raise RuntimeError("no decode kernel")
        super().init_forward_metadata(batch)


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("bad", ["few", "many"])
def test_where_one_fails_its_probe_the_other_serves_all_sizes(bad, graph, byte_vocabulary):
    good = {"few": "many", "many": "few"}[bad]
    ours = runner(by_batch(graph=graph), offer(bad, Failing), offer(good))
    assert [each.candidate.name for each in ours.instances] == [good]
    [notice] = ours.notices
    assert f"the backend {bad} (in this process) failed: RuntimeError: no decode kernel" in notice
    assert f"choosing again without {bad}" in notice
    one = runner(Policy(graph="off", cascade="off", page_size=4), offer("one"))
    assert serve(ours, byte_vocabulary, PROMPTS[:3]) == serve(one, byte_vocabulary, PROMPTS[:3])


@pytest.mark.parametrize("bad", ["few", "many"])
def test_one_that_was_asked_for_by_batch_size_and_fails_is_refused_by_name(bad):
    good = {"few": "many", "many": "few"}[bad]
    with pytest.raises(PluginError, match=rf"the backend {bad} .* failed: RuntimeError: no decode kernel"):
        runner(schedule(cascade="off"), offer(bad, Failing), offer(good), offer("third", preference=9.0))


class Breaking(Noting):
    """Passes its probe and captures, and then fails in whatever it decodes."""

    working = True

    def init_forward_metadata(self, batch):
        if not Breaking.working:
            raise RuntimeError("no such instruction")
        super().init_forward_metadata(batch)


@pytest.mark.parametrize("graph", ["off", "on"])
def test_a_step_that_fails_is_noted_by_who_served_its_size(graph, monkeypatch):
    ours = runner(by_batch(graph=graph), offer("few"), offer("many", Breaking))
    slots = [ours.pages.open() for _ in range(3)]
    ours.forward(slots, [[1, 2]] * 3)
    monkeypatch.setattr(Breaking, "working", False)
    ours.forward(slots[:2], [[1]] * 2)
    with pytest.raises(RuntimeError, match="no such instruction") as caught:
        ours.forward(slots, [[1]] * 3)
    assert caught.value.__notes__ == ["a step of many (in this process) failed"]


def test_a_backend_that_will_not_replay_is_counted_and_serves_eagerly_by_the_rows_there_are():
    class Hesitant(Noting):
        def init_forward_metadata_replay_cuda_graph(self, batch):
            if batch.num_real_reqs == 3:
                raise GraphFallback("three is one too many")
            super().init_forward_metadata_replay_cuda_graph(batch)

    ours = runner(by_batch(most=3, graph="on"), offer("few"), offer("many", Hesitant), graph_sizes=(2, 4))
    slots = [ours.pages.open() for _ in range(3)]
    ours.forward(slots, [[1, 2]] * 3)
    ours.forward(slots, [[1]] * 3)
    [(fallback, count)] = ours.graphs.fallbacks.items()
    assert (fallback.kind, str(fallback), count) == ("backend", "three is one too many", 1)
    assert decoding(ours)["few"].backend.seen[-1] == (None, "decode", 3, 0)


def test_graphs_are_for_all_sizes_or_none():
    plain = [offer("few", graph=False), offer("many")]
    assert runner(schedule(graph="auto", cascade="off"), *plain).graphs is None
    with pytest.raises(NegotiationError, match="graph"):
        runner(schedule(graph="on", cascade="off"), *plain)


# Decisions


def test_a_pinned_decision_runs_as_it_was_and_one_that_was_edited_is_refused():
    first = runner(by_batch())
    again = Decision.model_validate_json(first.decision.model_dump_json())
    pinned = runner(again.pin(Policy(cascade="off")))
    assert pinned.decision.outcome == first.decision.outcome
    assert {name: each.spec for name, each in decoding(pinned).items()} == {
        name: each.spec for name, each in decoding(first).items()
    }
    (few, _) = again.choice("all", "decode").winners
    choices = [c.model_copy(update={"winners": (few,)}) if c.role == "decode" else c for c in again.choices]
    edited = again.model_copy(update={"choices": tuple(choices)}).model_dump_json()
    with pytest.raises(ValidationError, match="do not go up to any number of rows"):
        Decision.model_validate_json(edited)


@pytest.mark.parametrize(
    "sizes", [(), ((8, "few"),), ((None, "few"), (None, "many")), ((8, "few"), (8, "x"), (None, "y"))]
)
def test_a_schedule_goes_up_to_any_number_of_rows(sizes):
    with pytest.raises(ValidationError, match="the schedule of all/decode"):
        Policy(schedules={"all/decode": sizes})


def test_a_run_tells_who_serves_which_sizes_as_far_as_it_has_them(capsys):
    settings = Settings(Choices(), Limits(), SamplingParams(), None, {})
    for most, said in ((4, ["decode up to 2 rows: few", "decode beyond: many"]), (2, ["decode: few"])):
        tell_choice(settings, runner(by_batch(), max_batch=most))
        told = [line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()]
        assert [line for line in told if line.startswith("decode")] == said


def test_winners_are_told_with_the_sizes_that_they_serve():
    needs = requirements(CONFIGS["full"], device="cpu", dtype="float32")
    names = ("few", "many", "most")
    policy = Policy(schedules={"all/decode": ((2, "few"), (8, "many"), (None, "most"))})
    choice = negotiate(needs, [offer(name) for name in names], policy).choice("all", "decode")
    assert [choice.winner(rows).backend for rows in (1, 2, 3, 8, 9, 999)] == [names[i] for i in (0, 0, 1, 1, 2, 2)]
    shares = {most: [(share, winner.backend) for share, winner in choice.shares(most)] for most in (None, 8, 2)}
    assert shares[None] == [("decode up to 2 rows", "few"), ("decode up to 8 rows", "many"), ("decode beyond", "most")]
    assert shares[8] == [("decode up to 2 rows", "few"), ("decode beyond", "many")]
    assert shares[2] == [("decode", "few")]


@pytest.mark.parametrize(("config", "used"), [("latent", True), ("full", False)])
def test_expanding_that_makes_no_difference_is_told(config, used):
    ours = runner(Policy(expand_from=5, page_size=4), offer("one"), config=config)
    told = ["expanding from 5 tokens is not used: latent attention is not served in both forms"]
    assert ours.notices == ([] if used else told)
    assert ours.steps.expand_from == (5 if used else None)
