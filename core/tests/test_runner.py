"""The model runner: however a prompt is cut, whoever shares the batch, whichever backend runs, the logits are the same.

The backend here is plain attention in float64, a row and a head at a time; the reference does without a cache.
"""

from __future__ import annotations

import json

import pydantic
import pytest
import torch
from safetensors.torch import save_file

from headstock import ANY, AttentionBackend, Capabilities, ModelRunner, Offer, WorkspaceBytes
from headstock.errors import (
    HeadstockError,
    MemoryPlanError,
    ModelError,
    NegotiationError,
    OutOfPages,
    PluginError,
    RequestError,
)
from headstock.kv.layout import NHD, PagedView
from headstock.models.config import ModelConfig
from headstock.models.llama import Llama
from headstock.models.shapes import weight_shapes
from headstock.models.weights import WeightSource
from headstock.negotiate import Policy
from headstock.offer import Candidate, Fault

pytestmark = pytest.mark.usefixtures("one_thread")

RAW = {
    "model_type": "qwen2", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip
MODELS = {
    "one group": RAW,
    "two groups": RAW | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}


class Plain(AttentionBackend):
    """Attention in float64, a request at a time; `seen` collects what it was asked to do."""

    def __init__(self, spec, workspace):
        super().__init__(spec, workspace)
        self.seen = []

    def init_forward_metadata(self, batch):
        self.seen.append((batch.phase, batch.num_reqs, batch.num_tokens))
        batch.metadata = "planned"

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        assert batch.metadata == "planned"
        layer.kv.write(k, v, batch.out_cache_loc)
        size, group = self.spec.page_size, self.spec.num_heads // self.spec.num_kv_heads
        for row in range(batch.num_reqs):
            start, end = batch.query_indptr[row : row + 2].tolist()
            at = torch.arange(int(batch.seq_lens[row]))
            keys, values = layer.kv.gather(batch.page_table[row, at // size].long() * size + at % size)
            out[start:end] = attention(q[start:end], keys, values, group, self.spec.scale, self.spec.window)


def attention(q, keys, values, group, scale, window):
    """Causal attention of the last queries over all keys, in float64."""
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    distance = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
    hidden = (distance < 0) | (distance >= (window or len(keys)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def offer(
    backend=Plain, name="plain", *, phases=("extend", "decode"), preference=0.0, layouts=("nhd", "hnd"), **fields
):
    can = Capabilities(
        devices={"cpu"}, phases=set(phases), attention={"paged"}, dtypes={"float32", "bfloat16"}, head_dims=ANY,
        page_sizes=ANY, kv_layouts=set(layouts), kv_dtypes={"same", "float8_e4m3fn"}, sliding_window=True,
        preference=preference, host_lengths="exact",
    )  # fmt: skip
    return Offer(name=name, backend=backend, capabilities=can, **fields)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model folders with weights large enough that attention, positions and windows all show in the logits."""
    made = {}
    for name, raw in MODELS.items():
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        generator = torch.Generator().manual_seed(0)
        shapes = weight_shapes(ModelConfig.from_hf(raw))
        drawn = {key: torch.randn(shape, generator=generator) * 0.3 for key, shape in shapes.items()}
        save_file(
            {k: x + 1 if k.endswith("norm.weight") else x for k, x in drawn.items()}, folder / "model.safetensors"
        )
        made[name] = folder
    return made


@pytest.fixture(scope="module")
def folder(folders):
    return folders["one group"]


def runner(model, *offers, **given):
    sizes = {"max_batch": 4, "max_tokens": 64, "kv_tokens": 400, "dtype": "float32"}
    return ModelRunner(model, offers=offers or [offer()], **sizes | given)


def dense_logits(folder, prompt, kv_dtype=torch.float32):
    """Logits after every token of a prompt [T, vocab], with no cache and no backend; keys and values as `kv_dtype`."""
    config = ModelConfig.from_folder(folder)
    model = Llama(config, torch.float32)
    model.load(WeightSource(folder))

    def attend(index, q, k, v, out):
        shape = config.layers[index]
        k, v = k.to(kv_dtype), v.to(kv_dtype)
        out.copy_(attention(q, k, v, shape.num_heads // shape.num_kv_heads, shape.scale, shape.window))

    with torch.inference_mode():
        return model.forward(torch.tensor(prompt), torch.arange(len(prompt)), attend)


def run(runner, prompt, cuts=()):
    """The last logits of a prompt that is run in pieces."""
    slot = runner.pages.open()
    for start, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        logits = runner.forward([slot], [prompt[start:end]])
    runner.pages.close(slot)
    return logits[0]


def close(given, expected):
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


def prompt_of(length, seed=0):
    return torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# What a step computes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("page_size", "layout"), [(1, "nhd"), (4, "hnd"), (16, "nhd")])
def test_a_prompt_in_one_go_in_chunks_and_token_by_token_gives_the_dense_logits(folders, model, page_size, layout):
    prompt = prompt_of(23)
    expected = dense_logits(folders[model], prompt)
    ours = runner(folders[model], policy=Policy(page_size=page_size, kv_layouts={"all": layout}))
    assert (ours.page_size, ours.instances[0].spec.kv_layout) == (page_size, layout)
    for cuts in [(), (1,), (22,), (4, 16), (7, 8, 9, 10), range(1, 23)]:
        close(run(ours, prompt, cuts), expected[-1])
    assert ours.pages.allocator.num_free == ours.memory.num_pages - 1


@pytest.mark.parametrize("model", MODELS)
def test_a_row_of_a_batch_is_the_row_alone_whatever_else_is_in_it(folders, model):
    ours = runner(folders[model])
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 9, 17, 40))]
    expected = [dense_logits(folders[model], prompt) for prompt in prompts]
    slots = [ours.pages.open() for _ in prompts]
    # First all but the last three tokens of the longer ones, then rows of mixed lengths, then a step of decoding.
    ours.forward(slots[1:], [prompt[:-3] for prompt in prompts[1:]])
    logits = ours.forward(slots[::-1], [prompts[3][-3:-1], prompts[2][-3:-1], prompts[1][-3:-2], prompts[0]])
    wanted = [expected[3][-2], expected[2][-2], expected[1][-3], expected[0][0]]
    close(logits, torch.stack(wanted))
    logits = ours.forward(slots[1:], [prompts[1][-2:-1], prompts[2][-1:], prompts[3][-1:]])
    close(logits, torch.stack([expected[1][-2], expected[2][-1], expected[3][-1]]))
    assert [ours.pages.lengths[slot] for slot in slots] == [1, 8, 17, 40]


def test_fp8_in_the_cache_takes_a_byte_per_number_and_is_what_is_attended_to(folder):
    prompt = prompt_of(23)
    ours, full = runner(folder, kv_dtype="float8_e4m3fn"), runner(folder)
    assert ours.memory.bytes_per_page * 4 == full.memory.bytes_per_page
    logits = run(ours, prompt)
    close(logits, dense_logits(folder, prompt, torch.float8_e4m3fn)[-1])
    assert (logits - run(full, prompt)).abs().max() > 0.01


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0), (2, 0, 3, 1)])
def test_a_mixed_step_is_the_same_in_one_segment_and_in_two_in_any_order_of_rows(folders, model, order):
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 9, 17, 40))]
    new, logits = [1, 1, 3, 40], {}
    for mixed in ("extend", "split"):
        ours = runner(folders[model], mixed=mixed)
        slots = [ours.pages.open() for _ in prompts]
        ours.forward(slots[1:3], [prompts[1][:-1], prompts[2][:-3]])
        logits[mixed] = ours.forward([slots[i] for i in order], [prompts[i][-new[i] :] for i in order])
        segments = [("extend", 4, 45)] if mixed == "extend" else [("decode", 2, 2), ("extend", 2, 43)]
        for instance in ours.instances:
            assert instance.backend.seen[-len(segments) :] == segments
            assert instance.spec.max_plans == len(segments)
        single = ours.forward(slots[:1], [[5]])
        assert ours.instances[0].backend.seen[-1] == ("decode", 1, 1)
        close(single[0], dense_logits(folders[model], [*prompts[0], 5])[-1])
    close(logits["split"], logits["extend"])
    close(logits["split"], torch.stack([dense_logits(folders[model], prompts[i])[-1] for i in order]))


def test_random_weights_are_drawn_by_seed():
    config = ModelConfig.from_hf(RAW)
    first, again, other = (run(runner(config, seed=seed), [1, 2, 3]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# Who runs it


def test_layer_groups_have_instances_of_their_own(folders):
    ours = runner(folders["two groups"])
    assert [(each.spec.group, each.spec.window) for each in ours.instances] == [("full", None), ("window-5", 5)]
    assert all(each.spec.phases == {"extend", "decode"} for each in ours.instances)
    run(ours, prompt_of(5), (3, 4))
    steps = [("extend", 1, 3), ("decode", 1, 1), ("decode", 1, 1)]
    assert all(each.backend.seen[-3:] == steps for each in ours.instances)


def test_phases_may_have_different_winners_and_share_one_cache(folder):
    prompt = prompt_of(12)
    ours = runner(
        folder,
        offer(name="wide", phases=["extend"]),
        offer(name="quick", phases=["decode"]),
        offer(name="both", preference=-1),
    )
    assert {role: servers.first.candidate.name for (_, role), servers in ours.roles.items()} == {
        "extend": "wide",
        "decode": "quick",
    }
    close(run(ours, prompt, (10, 11)), dense_logits(folder, prompt)[-1])
    wide, quick = (ours.roles["all", role].first.backend for role in ("extend", "decode"))
    assert wide.seen[-1] == ("extend", 1, 10)
    assert quick.seen[-2:] == [("decode", 1, 1)] * 2


@pytest.mark.parametrize("name", ["plain", "Plain", "second_best", "second.best", "runner-up"])
def test_an_explicit_choice_is_kept_in_any_spelling(folder, name):
    offers = [offer(preference=5), offer(name="second-best", aliases=("runner_up",))]
    ours = runner(folder, *offers, policy=Policy(backends={"all": name}))
    expected = "plain" if name.lower() == "plain" else "second-best"
    assert {instance.candidate.name for instance in ours.instances} == {expected}


def test_a_choice_for_one_phase_leaves_the_other_to_negotiation(folder):
    offers = [offer(preference=5), offer(name="other")]
    ours = runner(folder, *offers, policy=Policy(backends={"decode": "other"}))
    assert [ours.roles["all", role].first.candidate.name for role in ("extend", "decode")] == ["plain", "other"]


def test_a_layout_that_a_plugin_brings_holds_the_cache(folder):
    class Reversed(NHD):
        """Tokens last to first."""

        @classmethod
        def view(cls, storage, spec, k_scale, v_scale):
            plain = super().view(storage, spec, k_scale, v_scale)
            return Backwards(plain.k, plain.v, k_scale, v_scale)

    class Backwards(PagedView):
        def write(self, k, v, loc):
            super().write(k, v, self.turned(loc))

        def gather(self, loc):
            return super().gather(self.turned(loc))

        def turned(self, loc):
            page = self.k.shape[1]
            return loc // page * page + page - 1 - loc % page

    ours = runner(folder, offer(layouts=["reversed"], kv_layouts={"reversed": Reversed}))
    prompt = prompt_of(21)
    assert ours.instances[0].layout is Reversed
    close(run(ours, prompt, (5,)), dense_logits(folder, prompt)[-1])


def test_options_reach_their_backend_under_any_of_its_names(folder):
    class Options(pydantic.BaseModel):
        split_size: int = 1

    mine = offer(name="mine", aliases=("my-own",), options=Options)
    ours = runner(folder, mine, options={"My_Own": {"split_size": 7}})
    assert ours.instances[0].spec.options == Options(split_size=7)
    assert runner(folder, mine).instances[0].spec.options == Options()
    with pytest.raises(HeadstockError, match="given: yours; would work: mine"):
        runner(folder, mine, options={"yours": {}})
    with pytest.raises(
        PluginError, match="the backend mine has no option 'splitsize'; would work: split_size, perhaps"
    ):
        runner(folder, mine, offer(name="best", preference=9.0), options={"mine": {"splitsize": 7}})
    with pytest.raises(PluginError, match="the backend best has no options; given: block"):
        runner(folder, mine, offer(name="best"), options={"best": {"block": 7}})
    with pytest.raises(PluginError, match="options of mine: split_size"):
        runner(folder, mine, offer(), options={"mine": {"split_size": "many"}})


def test_workspaces_are_aligned_zeroed_and_scratch_is_shared(folders):
    class Hungry(Plain):
        @classmethod
        def workspace_bytes(cls, spec):
            return WorkspaceBytes(scratch=1000 if spec.window else 70, state=300)

    ours = runner(folders["two groups"], offer(Hungry))
    first, second = (instance.backend.workspace for instance in ours.instances)
    assert first.scratch.data_ptr() == second.scratch.data_ptr()
    assert first.state.data_ptr() != second.state.data_ptr()
    assert (first.scratch.numel(), second.scratch.numel(), first.state.numel()) == (70, 1000, 300)
    for memory in (first.scratch, first.state, second.state):
        assert memory.dtype == torch.uint8
        assert memory.data_ptr() % 256 == 0
    assert not first.state.any()
    assert (ours.memory.scratch, ours.memory.state) == (1000, 600)


def test_preparation_comes_before_weights_and_reports_progress(folder):
    from headstock.backend import Progress

    class Compiled(Plain):
        @classmethod
        def prepare(cls, spec, report):
            report(Progress("compiling", 1, 2))

    told = []
    runner(folder, offer(Compiled), progress=lambda *step: told.append(step))
    assert told[0] == ("compiling", 1, 2)
    assert {what for what, _, _ in told[1:]} == {"loading weights"}


# What is broken


def fail_in_constructor(self, spec, workspace):
    raise RuntimeError("built for another torch\nand a long story")


def fail_in_planning(self, batch):
    raise ValueError("no kernel for page size 16")


def give_nan(self, q, k, v, layer, batch, *, out, lse=None):
    out.fill_(float("nan"))


def leave_unwritten(self, q, k, v, layer, batch, *, out, lse=None):
    layer.kv.write(k, v, batch.out_cache_loc)


def exit_in_forward(self, q, k, v, layer, batch, *, out, lse=None):
    raise SystemExit("no device")


FAULTS = {
    "constructor": ({"__init__": fail_in_constructor}, "RuntimeError: built for another torch"),
    "planning": ({"init_forward_metadata": fail_in_planning}, "no kernel for page size 16"),
    "nan": ({"forward": give_nan}, "not finite"),
    "unwritten": ({"forward": leave_unwritten}, "not finite"),
    "exit": ({"forward": exit_in_forward}, "no device"),
    "workspace": ({"workspace_bytes": classmethod(lambda cls, spec: 4096)}, "TypeError"),
    "prepare": ({"prepare": classmethod(lambda cls, spec, report: 1 / 0)}, "ZeroDivisionError"),
    "contract": ({"forward_decode": lambda self: None}, "'forward_decode' is no hook"),
    "abstract": ({"forward": AttentionBackend.forward}, "it leaves forward unwritten"),
}


def faulty(case, **fields):
    return offer(type("Faulty", (Plain,), FAULTS[case][0]), "faulty", **fields)


@pytest.mark.parametrize("case", FAULTS)
def test_a_backend_that_fails_is_passed_over_loudly_where_nobody_asked_for_it(folder, case):
    ours = runner(folder, faulty(case, preference=9), offer())
    assert {instance.candidate.name for instance in ours.instances} == {"plain"}
    [notice] = [each for each in ours.notices if "faulty" in each]
    assert FAULTS[case][1] in notice
    assert "choosing again without faulty" in notice
    assert "\n" not in notice
    assert any(refusal.backend == "faulty" and refusal.fault for refusal in ours.decision.refused)
    prompt = prompt_of(6)
    close(run(ours, prompt), dense_logits(folder, prompt)[-1])


@pytest.mark.parametrize("case", FAULTS)
@pytest.mark.parametrize("scope", ["all", "decode"])
def test_a_backend_that_fails_is_refused_with_its_cause_where_it_was_asked_for(folder, case, scope):
    with pytest.raises(PluginError) as caught:
        runner(folder, faulty(case), offer(preference=1), policy=Policy(backends={scope: "faulty"}))
    message = str(caught.value)
    assert FAULTS[case][1] in message
    assert "faulty (in this process)" in message
    assert "type: " not in message, "no command sees what is of this process alone"
    assert "\n" not in message
    assert caught.value.__cause__ is not None


def test_an_interrupt_while_backends_start_passes(folder):
    def interrupt(self, batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner(
            folder,
            offer(type("Slow", (Plain,), {"init_forward_metadata": interrupt}), preference=1),
            offer(name="other"),
        )


def test_when_all_fail_the_error_says_why_of_each(folder):
    with pytest.raises(NegotiationError) as caught:
        runner(folder, faulty("constructor"), offer("no_such_package_x:Backend", "absent"))
    message = str(caught.value)
    assert "built for another torch" in message
    assert "no_such_package_x" in message


def test_a_broken_namesake_does_not_take_the_place_of_a_healthy_backend(folder):
    broken = Candidate(name="plain", fault=Fault(what="it is broken"), distribution="zzz", version="1")
    for offers in ([broken, offer()], [offer(), broken]):
        assert runner(folder, *offers).instances[0].backend_class is Plain


# What is refused, and when


def test_refusals_come_before_weights_are_read(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:500])
    with pytest.raises(NegotiationError, match="paged"):
        runner(tmp_path, Offer(name="gpu", backend=Plain, capabilities=offer().capabilities[0].model_copy(
            update={"devices": frozenset({"cuda"})}
        )))  # fmt: skip
    with pytest.raises(PluginError, match="no kernel for page size"):
        runner(tmp_path, faulty("planning"), policy=Policy(backends={"all": "faulty"}))
    with pytest.raises(MemoryPlanError):
        runner(tmp_path, kv_tokens=0)
    with pytest.raises(ModelError, match="safetensors"):
        runner(tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_tokens": 0}, "KV cache is too small"),
        ({"kv_tokens": -1}, "KV cache is too small"),
        ({"kv_tokens": 10**12}, "does not fit"),
        ({"max_context": 0}, "max_context is too small"),
        ({"max_context": 97}, "at most 96, the model's own"),
        ({"max_batch": 0}, "max_batch is too small"),
        ({"max_tokens": 3}, "max_tokens is too small; given: 3; would work: 4 or more"),
        ({"mixed": "both"}, 'not a way to run a step; given: both; would work: "auto", "extend" or "split"'),
        ({"device": "nowhere"}, "unknown device; given: nowhere; would work: cpu, cuda"),
        ({"device": "gpu"}, "unknown device; given: gpu; would work: cuda, perhaps (known: cpu, cuda"),
        ({"device": "meta"}, "unknown device; given: meta; would work: "),
        ({"device": "cpu:3"}, "there is one CPU; given: cpu:3; would work: cpu"),
        ({"dtype": "float33"}, "unknown dtype; given: float33; would work: float32, perhaps (known: bfloat16, float16"),
        ({"dtype": "bf16"}, "given: bf16; would work: bfloat16, perhaps (known: bfloat16"),
        ({"kv_dtype": "fp8"}, "unknown dtype of the KV cache; given: fp8; would work: float8_e4m3fn, perhaps (known: "),
        ({"policy": Policy(backends={"all": "plian"})}, "'plain', perhaps"),
        ({"policy": Policy(kv_layouts={"all": "hdn"})}, "hdn"),
        ({"max_batch": "4"}, "max_batch is a whole number; given: '4'"),
        ({"max_batch": True}, "max_batch is a whole number; given: True"),
        ({"max_tokens": 32.5}, "max_tokens is a whole number"),
        ({"max_context": "64"}, "max_context is a whole number"),
        ({"kv_tokens": 1.5}, "kv_tokens has the wrong type; given: 1.5; would work: a whole number"),
        ({"policy": {}}, "policy has the wrong type"),
        ({"options": {"plain": 5}}, 'would work: {"BACKEND": {"OPTION": VALUE}}'),
    ],
)
def test_what_cannot_be_is_refused_in_words(folder, given, said):
    with pytest.raises(HeadstockError) as caught:
        runner(folder, **given)
    assert said in str(caught.value)


def test_offers_that_are_none_are_refused(folder):
    with pytest.raises(HeadstockError, match="offers are offers, candidates or plugins; given: 1"):
        runner(folder, 1)


def test_a_dtype_of_torch_is_taken_as_its_name(folder):
    assert runner(folder, dtype=torch.float32).dtype == "float32"


@pytest.mark.parametrize("tokens", [[-1], [3, 10**6]])
def test_tokens_beyond_the_vocabulary_and_slots_not_open_run_nothing(folder, tokens):
    running = runner(folder)
    slot = running.pages.open()
    with pytest.raises(HeadstockError, match="not in the vocabulary"):
        running.forward([slot], [tokens])
    with pytest.raises(HeadstockError, match="no request is open in this slot; given: 99"):
        running.forward([99], [[1]])
    assert running.pages.length(slot) == 0


def test_without_any_backend_the_error_says_what_to_install(folder):
    with pytest.raises(NegotiationError):
        ModelRunner(folder, offers=[], dtype="float32")


# What a failed step leaves behind


def test_a_step_that_finds_no_pages_has_changed_nothing(folder):
    ours = runner(folder, kv_tokens=32, policy=Policy(page_size=4))
    prompts = [prompt_of(14, 1), prompt_of(15, 2)]
    slots = [ours.pages.open() for _ in prompts]
    ours.forward(slots, [prompts[0][:12], prompts[1][:11]])
    other = ours.pages.open()
    ours.forward([other], [[1]])
    assert ours.pages.allocator.num_free == 1
    with pytest.raises(OutOfPages):
        ours.forward(slots, [prompts[0][12:], prompts[1][11:14]])
    assert ours.pages.allocator.num_free == 1
    assert [ours.pages.lengths[slot] for slot in slots] == [12, 11]
    ours.pages.close(other)
    logits = ours.forward(slots, [prompts[0][12:], prompts[1][11:]])
    close(logits, torch.stack([dense_logits(folder, prompt)[-1] for prompt in prompts]))
    for slot in slots:
        ours.pages.close(slot)
    assert ours.pages.allocator.num_free == 8


@pytest.mark.parametrize("where", ["init_forward_metadata", "forward"])
def test_a_step_that_raises_can_be_run_again(folder, where):
    class Flaky(Plain):
        fail = False

        def init_forward_metadata(self, batch):
            if self.fail and where == "init_forward_metadata":
                raise RuntimeError("the device is gone")
            super().init_forward_metadata(batch)

        def forward(self, q, k, v, layer, batch, *, out, lse=None):
            if self.fail and layer.index == 1:
                raise RuntimeError("the device is gone")
            super().forward(q, k, v, layer, batch, out=out, lse=lse)

    ours, prompt = runner(folder, offer(Flaky)), prompt_of(20)
    slot = ours.pages.open()
    ours.forward([slot], [prompt[:9]])
    Flaky.fail = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        ours.forward([slot], [prompt[9:]])
    Flaky.fail = False
    assert ours.pages.lengths[slot] == 9
    close(ours.forward([slot], [prompt[9:]])[0], dense_logits(folder, prompt)[-1])
    ours.pages.close(slot)
    assert ours.pages.allocator.num_free == ours.memory.num_pages - 1


def test_a_step_that_makes_no_sense_is_refused_before_it_runs(folder):
    ours = runner(folder, max_context=20, max_tokens=30)
    one, two = ours.pages.open(), ours.pages.open()
    ours.forward([one], [prompt_of(19)])
    for slots, tokens, error, said in [
        ([], [], HeadstockError, "distinct slots"),
        ([two, two], [[1], [2]], HeadstockError, "distinct slots"),
        ([one, two], [[1]], HeadstockError, "distinct slots"),
        ([two], [[]], HeadstockError, "distinct slots"),
        ([one, two], [[1], []], HeadstockError, "distinct slots"),
        ([one, two], [[1] * 16, [1] * 15], HeadstockError, "1…30 in all"),
        ([3], [[1]], HeadstockError, "no request is open"),
        ([two, one], [[1] * 9, [1, 2]], RequestError, "21 tokens in a context of 20"),
    ]:
        with pytest.raises(error, match=said):
            ours.forward(slots, tokens)
        assert (ours.pages.lengths[one], ours.pages.lengths[two]) == (19, 0)
    close(ours.forward([one], [prompt_of(20)[19:]])[0], dense_logits(folder, prompt_of(20))[-1])


# Who watches


WATCHER = """
from headstock import hookimpl

seen = []

@hookimpl
def on_decision(decision):
    seen.append(("decision", decision.solved))

@hookimpl
def before_forward(batch):
    seen.append(("before", batch.num_tokens, batch.metadata))

@hookimpl
def after_forward(batch):
    seen.append(("after", batch.num_tokens))
    if len(seen) > 9:
        raise RuntimeError("the disk is full")
"""


def test_observers_hear_of_each_step_once_per_group_and_a_failing_one_stops_nothing(folders, tmp_path, monkeypatch):
    (tmp_path / "watcher_x.py").write_text(WATCHER, encoding="utf-8")
    offering = "from headstock import hookimpl\nOFFERS = []\n@hookimpl\ndef attention_backends():\n    return OFFERS\n"
    (tmp_path / "offering_x.py").write_text(offering, encoding="utf-8")
    info = tmp_path / "watcher_x-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: watcher-x\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[headstock]\nwatcher = watcher_x\noffering = offering_x\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "watcher,offering")
    import offering_x
    import watcher_x

    offering_x.OFFERS.append(offer())
    ours = ModelRunner(folders["two groups"], dtype="float32", max_batch=2, kv_tokens=100)
    assert watcher_x.seen == [("decision", True)]
    assert ours.candidates[0].source == "watcher-x 1.0"
    prompt = prompt_of(8)
    logits = run(ours, prompt, (5,))
    step = [("before", 5, None)] * 2 + [("after", 5)] * 2
    assert watcher_x.seen[1:5] == step
    assert watcher_x.seen[5:] == [("before", 3, None)] * 2 + [("after", 3)] * 2
    run(ours, prompt)
    assert len(watcher_x.seen) == 12
    [notice] = [each for each in ours.notices if "watcher" in each]
    assert "the disk is full" in notice
    close(run(ours, prompt), logits)
    assert len(watcher_x.seen) == 12
