"""The comparison: what is checked before it is timed, what a scene holds, and what tables, documents and plots show."""

from __future__ import annotations

import json
import re

import pytest
import torch

from headstock.bench.compare import Comparison
from headstock.bench.kernels import kernels
from headstock.bench.plots import draw, page, save
from headstock.bench.report import as_dict, duration, failures, kernel, ordered, quantity, row
from headstock.bench.scene import Scene
from headstock.bench.stand import Contestant, Scenes
from headstock.bench.timing import Limits, Times, by_turns, measure_limits
from headstock.bench.workload import parse
from headstock.device import Device
from headstock.errors import HeadstockError
from headstock.kv.layout import BUILTIN_LAYOUTS
from headstock.models.config import ModelConfig
from headstock.negotiate import negotiate
from headstock.offer import Candidate, Offer
from headstock.policy import Policy
from headstock.runner.requirements import requirements
from headstock.testing.problem import make_spec
from headstock.testing.specimen import CAPABILITIES, OFFER, Specimen

CPU = Device.open("cpu")
LIMITS = Limits(1e10, 1e11)


def config(**fields):
    llama = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    }  # fmt: skip
    return ModelConfig.from_hf(llama | fields)


WINDOWED = {"model_type": "gemma3_text", "sliding_window": 20, "num_hidden_layers": 6}


def taking(clock, forward, plan=0.0):
    """A sound backend whose layers and plans take so many seconds of the test's clock."""

    class Taking(Specimen):
        def init_forward_metadata(self, batch):
            clock.sleep(plan)
            super().init_forward_metadata(batch)

        def forward(self, q, k, v, layer, batch, *, out, lse=None):
            clock.sleep(forward)
            super().forward(q, k, v, layer, batch, out=out, lse=lse)

    return Taking


class Wrong(Specimen):
    """A backend that forgets its last key in batches of more than two rows."""

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        super().forward(q, k, v, layer, batch, out=out, lse=lse)
        if batch.num_reqs > 2:
            out[-1] *= 1.5


class Breaks(Specimen):
    def init_forward_metadata(self, batch):
        raise OSError("libkernel.so: cannot open shared object file")


def offered(name, backend=Specimen, **fields):
    return Candidate.of(Offer(name=name, backend=backend, capabilities=(CAPABILITIES.model_copy(update=fields),)))


def compare(texts, *candidates, of=None, policy=None, **options):
    of = of or config()
    needs = requirements(of, device="cpu", dtype="float32")
    options = {"rounds": 3, "cold_bytes": 0} | options
    return Comparison(of, needs, candidates, policy or Policy(), CPU, **options).run(parse(texts))


def test_numbers_are_checked_before_they_are_timed(clock):
    field = [offered("slow", taking(clock, 3e-3)), offered("wrong", Wrong), offered("quick", taking(clock, 1e-3))]
    measured = compare("decode:{2,4}x9 extend:1x5+8", *field)
    timed = [(each.workload.name, each.backend) for each in ordered(measured)]
    whole = [("wrong", "quick", "slow"), ("quick", "slow"), ("wrong", "quick", "slow")]
    names = ("decode:2x9", "decode:4x9", "extend:1x5+8")
    assert timed == [(name, backend) for name, backends in zip(names, whole, strict=True) for backend in backends]
    (said,) = failures(measured)
    assert said.startswith("wrong: decode:4x9: wrong numbers: out [token, head, dim] is wrong")


def test_who_cannot_serve_is_not_timed_and_says_why():
    measured = compare("decode:2x9", offered("breaks", Breaks), offered("wide", head_dims=frozenset({64})))
    assert ordered(measured) == []
    said = dict(line.split(": ", 1) for line in failures(measured))
    assert "cannot open shared object file" in said["breaks"]
    assert "head_dims: needs 8" in said["wide"]


def test_figures_are_of_one_layer_with_planning_apart(clock):
    (each,) = compare("decode:2x16", offered("slow", taking(clock, 3e-3, 1e-4)), cold_bytes=40_000)
    assert each.device.median == pytest.approx(3e-3)  # whatever the number of layers behind it
    assert each.host.median == pytest.approx(1e-4)
    decode = requirements(config(), device="cpu", dtype="float32")[1]
    assert each.work == parse("decode:2x16")[0].work(decode, 4, 4)
    assert (each.page_size, each.kv_layout, each.graph) == (16, "nhd", False)
    assert each.described == {"kernel": "products", "keys": 16}
    share, limit = each.share(LIMITS)
    assert (share, limit) == (pytest.approx(each.work.num_bytes / each.device.median / 1e10), "memory")
    assert row(each, LIMITS)[:2] == ["decode:2x16", "slow"]


def test_the_choices_of_a_policy_hold():
    found = compare("decode:1x9", offered("a"), offered("b"), policy=Policy(backends={"decode": "b"}, page_size=4))
    assert [(each.backend, each.page_size) for each in found] == [("b", 4)]
    (refused,) = compare("decode:1x9", offered("c", page_sizes=frozenset({16})), policy=Policy(page_size=4))
    assert "page_sizes" in refused.failure


def test_every_layer_group_is_measured_by_itself():
    measured = compare("decode:1x40 extend:1x9+40", offered("a"), of=config(**WINDOWED))
    assert [(each.workload.name, each.group) for each in measured] == [
        ("decode:1x40", "window-20"), ("decode:1x40", "full"),
        ("extend:1x9+40", "window-20"), ("extend:1x9+40", "full"),
    ]  # fmt: skip
    assert not failures(measured)
    assert measured[0].work.flops < measured[1].work.flops


def test_latent_attention_is_measured_in_both_forms():
    latent = config(
        model_type="deepseek_v2", num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=None,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, num_experts_per_tok=1,
    )  # fmt: skip
    measured = compare("decode:3x20 extend:2x5+9", Candidate.of(OFFER), of=latent)
    assert [(each.label, each.failure, each.kv_layout) for each in measured] == [
        ("specimen", "", "latent"), ("specimen", "", "latent"), ("specimen, expanded", "", "latent"),
    ]  # fmt: skip
    assert measured[0].work.flops == 2 * 3 * 20 * 4 * (20 + 16)


def test_shared_prefixes_are_read_in_both_ways_by_who_can():
    measured = compare("cascade:3x32+9", offered("both"), offered("rows", cascade=False))
    assert sorted(each.label for each in measured) == ["both", "both, flat", "rows"]
    assert not failures(measured)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("fields", [{}, {"window": 11}, {"sinks": True, "alibi": True}, {"kv_dtype": "float8_e4m3fn"}])
@pytest.mark.parametrize("text", ["decode:3x33", "extend:2x7+20", "cascade:3x16+5"])
@pytest.mark.parametrize("lies", [{"scattered": False}, {"packed": True}])
def test_a_scene_checks_every_axis_and_notices_one_wrong_row(layout, fields, text, lies):
    (load,) = parse(text)
    spec = make_spec({"kv_layout": layout, "num_heads": 2, "num_kv_heads": 1, **fields}, (1,), context=64)
    scene = Scene(spec, BUILTIN_LAYOUTS[layout], load, cold_bytes=0, **lies)
    backend = Specimen(spec, None)
    backend.init_forward_metadata(scene.batch)
    backend.init_forward_metadata_in_graph(scene.batch)
    backend.forward(scene.q, scene.k, scene.v, scene.layers[0], scene.batch, out=scene.out)
    scene.check()
    scene.out[-1, 0] += 0.5
    with pytest.raises(AssertionError, match="out"):
        scene.check()


def test_packed_and_ordered_scenes_are_what_they_say():
    (load,), spec = parse("decode:4x33"), make_spec({}, (1,), context=64)
    usual = Scene(spec, BUILTIN_LAYOUTS["nhd"], load, cold_bytes=0)
    neat = Scene(spec, BUILTIN_LAYOUTS["nhd"], load, cold_bytes=0, scattered=False, packed=True)
    assert not usual.q.is_contiguous()
    assert neat.q.is_contiguous()
    assert torch.equal(usual.q, neat.q)
    assert (neat.batch.page_table.diff(dim=1) == 1).all()
    assert not (usual.batch.page_table.diff(dim=1) == 1).all()


def test_layers_are_enough_to_be_cold_and_what_does_not_fit_is_refused(monkeypatch):
    (load,), spec = parse("decode:2x32"), make_spec({}, (1,), context=64)
    scene = Scene(spec, BUILTIN_LAYOUTS["nhd"], load, cold_bytes=100_000)
    assert sum(each.numel() for each in scene.storages) >= 100_000
    monkeypatch.setattr(Device, "free_memory", lambda self: 1000)
    with pytest.raises(HeadstockError, match=r"decode:2x32: .* of queries, new keys and outputs; would work: at most"):
        Scene(spec, BUILTIN_LAYOUTS["nhd"], load)
    monkeypatch.setattr(Device, "free_memory", lambda self: 10_000)
    with pytest.raises(HeadstockError, match=r"decode:2x32: .* of keys and values; would work: at most"):
        Scene(spec, BUILTIN_LAYOUTS["nhd"], load)


def test_a_stand_can_be_captured():
    """The recording stand-in of the CPU replays what a device graph would."""
    one, (load,) = config(), parse("decode:3x20")
    need = requirements(one, device="cpu", dtype="float32")[1].model_copy(update={"page_size": 4, "kv_layout": "nhd"})
    contestant = Contestant(Candidate.of(OFFER), need, one.layers[0], graph=True)
    stand = Scenes(CPU, [], cold_bytes=0).stand(contestant, load, graph=True, max_context=64)
    assert stand.graph
    assert stand.scene.batch.page_table.shape == (3, 16)  # as wide as the bound, whatever the batch holds
    assert stand.described["keys"] == 64  # the bound of the graph, not what the batch holds
    stand.check()


def test_turns_are_whole_rounds_and_the_clock_is_no_part_of_them():
    calls: list[str] = []
    times = by_turns(CPU, {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 4)
    assert len(times["a"].samples) == len(times["b"].samples) == 4
    assert calls.count("a") > 100  # what takes no time is repeated
    stopped = by_turns(CPU, {"a": lambda: None}, 100, stop=lambda: True)
    assert len(stopped["a"].samples) == 3


def test_times_tell_median_and_middle_half():
    times = Times((1.0, 2.0, 3.0, 4.0, 100.0))
    assert (times.median, times.quartiles, times.spread) == (3.0, (2.0, 4.0), pytest.approx(2 / 3))
    assert Times((5.0,)).quartiles == (5.0, 5.0)


def test_limits_are_measured_on_this_device():
    limits = measure_limits(CPU, "float32", num_bytes=1 << 22, size=64)
    assert limits.bytes_per_second > 0
    assert limits.flops_per_second > 0
    assert limits.share(1, 10**9, 1.0)[1] == "matrix"


def test_numbers_are_words_with_units():
    assert [duration(s) for s in (2.5, 1.25e-3, 4.2e-5, 3e-8)] == ["2.5 s", "1.25 ms", "42 µs", "30 ns"]
    assert quantity(4.27e12, "B/s") == "4.27 TB/s"
    assert kernel({"kernel": "attend", "tensor_cores": True, "splits": 4}) == "attend, tensor cores yes, splits 4"


def test_the_kernels_of_a_decision_are_told():
    one = config()
    field = [offered("good"), offered("breaks", Breaks)]
    needs = requirements(one, device="cpu", dtype="float32")
    lines = list(kernels(negotiate(needs, field[:1]), one, field, CPU))
    assert lines[0] == "extend, extend:1x256: good: products, keys 256", "no more than the model's context"
    assert lines[-1] == "decode, decode:32x256: good: products, keys 256"
    broken = kernels(negotiate(needs, field[1:]), one, field, CPU)
    assert all("breaks: OSError: libkernel.so" in line for line in broken)


@pytest.fixture(scope="module")
def measured():
    texts = "decode:{1,2,4}x{8,16} extend:{1,2}x4 cascade:2x16+3"
    return compare(texts, offered("first"), offered("wrong", Wrong), offered("second"))


def test_the_document_is_json_with_every_figure(measured):
    document = json.loads(json.dumps(as_dict(measured, LIMITS, {"device": "here"})))
    assert document["device"] == "here"
    assert document["limits"] == {"bytes_per_second": 1e10, "flops_per_second": 1e11}
    timed = [each for each in document["figures"] if "seconds" in each]
    assert {"samples", "quartiles", "plan_seconds", "bytes", "flops", "of_limit", "kernel"} <= timed[0].keys()
    assert [each["failure"][:13] for each in document["figures"] if "failure" in each] == ["wrong numbers"] * 2


def test_plots_are_drawn_for_what_varies_and_the_page_holds_everything(measured, tmp_path):
    files = save(tmp_path / "new", measured, LIMITS, {"device": "a <b> machine", "dtype": "float32"})
    assert [file.name for file in files] == [
        "time-over-batch.png",
        "time-over-context.png",
        "roofline.png",
        "bench.html",
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files[:3])
    text = files[3].read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 3
    assert "a &lt;b&gt; machine" in text
    assert "wrong numbers" in text
    assert not re.search(r'(src|href)="(?!data:)', text)  # nothing else is needed to read it
    assert [*draw([each for each in measured if each.workload.name == "decode:1x8"], LIMITS)] == ["roofline"]
    assert "<h2>Not timed</h2>" not in page({}, [], LIMITS, {})
