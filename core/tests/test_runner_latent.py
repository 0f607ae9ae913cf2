"""Models with latent attention through the whole host: who is asked, in which form, and the tokens of transformers."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import pytest
import torch
import transformers

from headstock import ModelRunner, Offer, negotiate
from headstock.backend import WorkspaceBytes
from headstock.engine.engine import Engine
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.errors import NegotiationError
from headstock.models.config import ModelConfig
from headstock.policy import Policy
from headstock.render import explain
from headstock.runner.requirements import backend_spec, requirements
from headstock.testing.specimen import OFFER, Specimen

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 256, "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 12, "first_k_dense_replace": 1, "max_position_embeddings": 96,
    "num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "q_lora_rank": 20, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 3.0, "original_max_position_embeddings": 32,
        "mscale": 0.7, "mscale_all_dim": 0.7,
    },
}  # fmt: skip
CONFIG = ModelConfig.from_hf({"model_type": "deepseek_v3", **SHAPE})
PLAIN = ModelConfig.from_hf({
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
})  # fmt: skip
HERE = {"device": "cpu", "dtype": "float32"}


def only(*kinds: str, name: str = "partial", **changes) -> Offer:
    """The specimen, as far as it serves these kinds of attention."""
    records = [record for record in OFFER.capabilities if "cpu" in record.devices]
    latent = [record for record in records if "mla" in record.attention]
    plain = [r.model_copy(update={"attention": frozenset(kinds) - {"mla"}}) for r in records if r not in latent]
    kept = (latent if "mla" in kinds else []) + (plain if set(kinds) - {"mla"} else [])
    return OFFER.model_copy(
        update={"name": name, "capabilities": tuple(record.model_copy(update=changes) for record in kept)}
    )


MHA, ABSORBED = only("paged", "ragged", name="mha"), only("mla", name="absorbed")


# ---- who is asked for what


def test_a_latent_model_asks_for_one_of_two_forms_and_for_decoding():
    needs = requirements(CONFIG, device="cuda", dtype="bfloat16", kv_dtype="float8_e4m3fn", kv_scales=True)
    assert [(need.role, need.phase, need.attention, need.either) for need in needs] == [
        ("extend", "extend", "mla", "extend"),
        ("expand", "extend", "ragged", "extend"),
        ("decode", "decode", "mla", None),
    ]
    extend, expand, decode = needs
    for need in (extend, decode):
        assert (need.num_heads, need.num_kv_heads, need.head_dim, need.v_head_dim) == (4, 1, 20, 16)
        assert (need.kv_dtype, need.kv_scales, need.lse, need.non_causal) == ("float8_e4m3fn", True, False, False)
    assert (expand.num_heads, expand.num_kv_heads, expand.head_dim, expand.v_head_dim) == (4, 4, 12, 12)
    assert (expand.kv_dtype, expand.kv_scales, expand.lse, expand.non_causal) == ("bfloat16", False, True, True)
    temperature = 0.1 * 0.7 * torch.tensor(3.0).log().item() + 1
    for need in needs:
        spec = backend_spec([need], CONFIG.layers[0], device="cuda", num_sms=1, max_batch=1, max_tokens=1)
        assert spec.scale == pytest.approx(12**-0.5 * temperature**2)
        assert (spec.lse, spec.non_causal) == (need.lse, need.non_causal)


def served(config: ModelConfig, *offers: Offer, policy: Policy | None = None) -> dict[str, str]:
    decision = negotiate(requirements(config, **HERE), offers, policy or Policy())
    assert decision.solved
    return {choice.role: winner.backend for choice in decision.choices for winner in choice.winners}


def test_backends_of_one_form_and_of_the_other_share_a_model():
    assert served(CONFIG, MHA, ABSORBED) == {"extend": "absorbed", "expand": "mha", "decode": "absorbed"}
    assert served(CONFIG, ABSORBED) == {"extend": "absorbed", "decode": "absorbed"}
    decoder = only("mla", name="decoder", phases=frozenset({"decode"}))
    assert served(CONFIG, MHA, decoder) == {"expand": "mha", "decode": "decoder"}


@pytest.mark.parametrize("field", [{"lse": False}, {"non_causal": False}])
def test_who_expands_must_see_chunks_whole_and_return_what_merges_them(field):
    unfit = only("ragged", name="unfit", **field)
    assert served(CONFIG, unfit, ABSORBED) == {"extend": "absorbed", "decode": "absorbed"}


def test_a_latent_model_offered_mha_alone_is_refused_with_the_reason():
    with pytest.raises(NegotiationError) as caught:
        ModelRunner(CONFIG, offers=[MHA], dtype="float32")
    message = str(caught.value).splitlines()
    assert message[0].startswith("no installed backend serves decode: mla, 4/1 heads × 20 (v 16)")
    assert "  decode: mha: attention: needs mla, offers {paged, ragged}; try another backend" in message
    assert message[-1] == "  every backend lacks attention mla (decode)", "extending has an alternative that is served"


def test_a_plain_model_never_gets_a_backend_of_latent_attention():
    assert served(PLAIN, MHA, ABSORBED) == {"extend": "mha", "decode": "mha"}
    preferred = only("mla", name="absorbed", preference=1000.0)
    assert served(PLAIN, MHA, preferred) == {"extend": "mha", "decode": "mha"}
    decision = negotiate(requirements(PLAIN, **HERE), [ABSORBED], Policy())
    assert not decision.solved
    assert "    attention: needs paged, offers {mla}; try another backend" in explain(decision)


def test_what_a_token_takes_is_told_beside_what_it_would():
    decision = negotiate(requirements(CONFIG, **HERE), [MHA, ABSORBED], Policy())
    told = "{} bytes per token{}; keys and values of all heads would take {}"
    assert "  " + told.format(80, " and layer", 384) in explain(decision)
    runner = ModelRunner(CONFIG, offers=[OFFER], dtype="float32", kv_tokens=64, policy=Policy(page_size=16))
    assert runner.memory.bytes_per_page == 2 * 16 * 80
    assert told.format(160, "", 768) in runner.memory.lines()[-1]
    plain = ModelRunner(PLAIN, offers=[OFFER], dtype="float32", kv_tokens=64)
    assert "bytes per token" not in "\n".join(plain.memory.lines())


@pytest.mark.parametrize(
    ("policy", "kv_tokens", "rows", "context"),
    [
        (Policy(), 512, 0, 96),  # no row is long enough
        (Policy(expand_from=81), 512, 1, 96),
        (Policy(expand_from=40), 512, 3, 96),
        (Policy(unserved={"all/extend"}), 512, 4, 96),
        (Policy(unserved={"all/extend"}), 20, 4, 20),
        (Policy(unserved={"all/expand"}), 512, 0, 0),
    ],
)
def test_the_memory_plan_has_what_expanding_takes(policy, kv_tokens, rows, context):
    runner = ModelRunner(
        CONFIG, offers=[OFFER], policy=policy, dtype="float32", max_batch=4, max_tokens=128, kv_tokens=kv_tokens
    )
    keys, tokens = rows * context, min(rows * context, 128)
    assert runner.memory.expansion == keys * 4 * (20 + 4 * (12 + 8 + 12)) + tokens * 4 * (12 * 12 + 12)
    assert any(line.startswith("expansion") for line in runner.memory.lines()) == bool(rows)


# ---- what it computes


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3"])
def reference(request, tmp_path_factory, byte_vocabulary):
    """A random model of transformers, and its folder."""
    torch.manual_seed(0)
    family = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}[request.param]
    own = {"topk_method": "group_limited_greedy"} if request.param == "deepseek_v2" else {}
    config = getattr(transformers, f"{family}Config")(**SHAPE | own)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.15)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    byte_vocabulary.save(str(folder / "tokenizer.json"))
    return model.requires_grad_(False), folder


EXPANDING, ABSORBING = Policy(unserved={"all/extend"}), Policy(unserved={"all/expand"})
POLICIES = {
    "absorbed": ABSORBING, "expanded": EXPANDING, "both": Policy(expand_from=6), "graphs": Policy(graph="on"),
}  # fmt: skip


@pytest.mark.parametrize("mixed", ["extend", "split"])
@pytest.mark.parametrize("form", POLICIES)
def test_logits_of_any_steps_are_those_of_transformers(reference, form, mixed, monkeypatch):
    model, folder = reference
    monkeypatch.setattr("headstock.runner.latent.CHUNK_TOKENS", 7)
    runner = ModelRunner(
        folder, offers=[OFFER], policy=POLICIES[form], mixed=mixed, max_batch=4, max_tokens=64, kv_tokens=512,
        dtype="float32",
    )  # fmt: skip
    tokens = torch.randint(0, 256, (3, 44), generator=torch.Generator().manual_seed(1))
    expected = [model(row[None]).logits[0] for row in tokens]
    slots, ends = [runner.pages.open() for _ in tokens], [0, 0, 0]
    for counts in ([5, 1, 9], [1, 3, 1], [7, 7, 1], [1, 1, 1], [1, 1, 1], [12, 1, 4], [1, 12, 1], [9, 9, 9]):
        new = [row[end : end + count].tolist() for row, end, count in zip(tokens, ends, counts, strict=True)]
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
        logits = runner.forward(slots, new)
        for row, whole, end in zip(logits, expected, ends, strict=True):
            torch.testing.assert_close(row, whole[end - 1], atol=1e-4, rtol=0)
    if form == "graphs":
        assert runner.graphs.replays.total() == 2
        assert not runner.graphs.fallbacks


class Watched(Specimen):
    """The specimen, which notes what it is planned for."""

    seen: ClassVar[list[tuple[str, bool, int, int]]] = []

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.seen.append((self.spec.attention, batch.causal, batch.num_reqs, batch.num_tokens))


def planned(policy: Policy, mixed: str, *steps: list[int], context: int = 96) -> list[tuple[str, bool, int, int]]:
    """What the last of these steps is planned as: kind, causal, rows and tokens of each batch."""
    watched = OFFER.model_copy(update={"backend": Watched})
    rope = SHAPE["rope_parameters"] | {"factor": context / 32}
    config = {"model_type": "deepseek_v3", **SHAPE, "max_position_embeddings": context, "rope_parameters": rope}
    runner = ModelRunner(
        ModelConfig.from_hf(config), offers=[watched], policy=policy, mixed=mixed, dtype="float32", kv_tokens=512
    )
    slots = [runner.pages.open() for _ in steps[0]]
    for counts in steps:
        Watched.seen.clear()
        runner.forward(slots, [[1] * count for count in counts])
    return list(Watched.seen)


@pytest.mark.parametrize(
    ("policy", "mixed", "expected"),
    [
        (ABSORBING, "extend", [("mla", True, 4, 15)]),
        (ABSORBING, "split", [("mla", True, 1, 1), ("mla", True, 3, 14)]),
        (Policy(expand_from=5), "extend", [("mla", True, 2, 4), ("ragged", True, 2, 11)]),
        (Policy(expand_from=5), "split", [("mla", True, 1, 1), ("mla", True, 1, 3), ("ragged", True, 2, 11)]),
        (EXPANDING, "extend", [("mla", True, 1, 1), ("ragged", True, 3, 14)]),
        (Policy(), "extend", [("mla", True, 4, 15)]),
    ],
)  # fmt: skip
def test_rows_of_many_new_tokens_are_expanded_where_that_is_served(policy, mixed, expected):
    """Of 1, 6, 3 and 5 new tokens; by default six times as many as pay with these dimensions, 27, are."""
    assert planned(policy, mixed, [2, 2, 2, 2], [1, 6, 3, 5]) == expected
    assert planned(Policy(), mixed, [162, 161], context=192)[-1] == ("ragged", True, 1, 162)


@pytest.mark.parametrize(
    ("chunk", "chunks"), [(20, []), (19, [(3, 14)]), (6, [(3, 14)]), (4, [(2, 9), (1, 5)]), (3, [(2, 9), (2, 8)])]
)
def test_long_prefixes_are_attended_to_in_chunks_by_the_rows_that_have_keys_there(chunk, chunks, monkeypatch):
    """Rows of 6, 3 and 5 new tokens after 2 each: 20 keys in all."""
    monkeypatch.setattr("headstock.runner.latent.CHUNK_TOKENS", chunk)
    seen = planned(EXPANDING, "extend", [2, 2, 2], [6, 3, 5])
    assert seen == [("ragged", True, 3, 14), *(("ragged", False, *each) for each in chunks)]


class Particular(Specimen):
    """The specimen, which asks for as much scratch as its kind of attention has letters."""

    @classmethod
    def workspace_bytes(cls, spec):
        return WorkspaceBytes(len(spec.attention), 0)

    def __init__(self, spec, workspace):
        super().__init__(spec, workspace)
        assert len(workspace.scratch) == len(spec.attention)


def test_instances_share_a_scratch_of_which_each_gets_what_it_asked_for():
    particular = OFFER.model_copy(update={"backend": Particular})
    runner = ModelRunner(CONFIG, offers=[particular], dtype="float32", kv_tokens=64)
    assert {each.spec.attention for each in runner.instances} == {"mla", "ragged"}
    assert len({each.backend.workspace.scratch.data_ptr() for each in runner.instances}) == 1


def test_without_a_prefix_there_is_nothing_to_merge():
    assert planned(EXPANDING, "extend", [4, 3]) == [("ragged", True, 2, 7)]


def test_observers_hear_of_every_segment_before_and_after(monkeypatch):
    runner = ModelRunner(CONFIG, offers=[OFFER], policy=Policy(expand_from=5), dtype="float32", kv_tokens=512)
    heard = []
    monkeypatch.setattr(runner.observers, "notify", lambda hook, batch: heard.append((hook, batch.num_tokens)))
    runner.forward([runner.pages.open(), runner.pages.open()], [[1] * 6, [1] * 2])
    assert heard == [(hook, tokens) for hook in ("before_forward", "after_forward") for tokens in (2, 6)]


# ---- the engine over it


def greedy(model, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def answer(reference):
    model, _ = reference
    return cache(lambda prompt, count: greedy(model, list(prompt), count))


@pytest.mark.parametrize("form", POLICIES)
def test_the_engine_gives_transformers_greedy_tokens_cached_or_not_and_preempted(reference, answer, form):
    _, folder = reference
    draw = torch.Generator().manual_seed(2)
    base = torch.randint(0, 256, (30,), generator=draw).tolist()
    own = [torch.randint(0, 256, (count,), generator=draw).tolist() for count in (3, 9, 4, 21)]
    prompts = [tuple(base[:shared] + rest) for shared, rest in zip((30, 30, 9, 0), own, strict=True)]
    policy = POLICIES[form].model_copy(update={"page_size": 4})
    runner = ModelRunner(
        folder, offers=[OFFER], policy=policy, max_batch=4, max_tokens=16, kv_tokens=104, dtype="float32"
    )
    params = SamplingParams(max_tokens=12)
    with Engine(runner, Tokenizer.from_folder(folder), check=True) as engine:
        for _ in range(2):
            numbers = {engine.add_request(prompt, params): prompt for prompt in prompts}
            done = {}
            while engine.busy:
                done |= {output.request: output.completion for output in engine.step() if output.completion}
            assert {n: done[n].tokens for n in numbers} == {n: answer(p, 12) for n, p in numbers.items()}
        assert engine.stats.preemptions > 0
        assert engine.stats.cached_tokens > 0
