"""Tuning and its profile: what is measured, what the file is good for, and what negotiation makes of it."""

from __future__ import annotations

import json
import os

import pytest

from headstock.bench.machine import Machine, changed, packages
from headstock.bench.profile import Point, Profile, check_writable, default_file, judge, read, save, shape_of
from headstock.bench.tune import Tuner, default_grid, parse_budget
from headstock.bench.workload import parse
from headstock.capabilities import Capabilities
from headstock.device import Device
from headstock.errors import HeadstockError
from headstock.models.config import ModelConfig
from headstock.negotiate import negotiate
from headstock.offer import Candidate, Offer
from headstock.policy import Policy
from headstock.render import explain
from headstock.runner.requirements import requirements
from headstock.testing.specimen import CAPABILITIES, Specimen

HERE = Machine("a CPU (2 cores)", "Linux 6.1")
VERSIONS = {"headstock": "0.1.0", "torch": "2.13.0", "mine": "1.0"}
CPU = Device.open("cpu")


def config(**fields):
    llama = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    }  # fmt: skip
    return ModelConfig.from_hf(llama | fields)


def needs_of(one=None, **fields):
    return requirements(one or config(), device="cpu", dtype="float32", **fields)


def taking(clock, seconds):
    """A backend that takes `seconds(phase, rows)` of the test's clock for each layer."""

    class Taking(Specimen):
        def forward(self, q, k, v, layer, batch, *, out, lse=None):
            clock.sleep(seconds(batch.phase, batch.num_reqs))
            super().forward(q, k, v, layer, batch, out=out, lse=lse)

    return Taking


def offered(name, backend=Specimen, **fields):
    record = Capabilities(**{axis: getattr(CAPABILITIES, axis) for axis in Capabilities.model_fields} | fields)
    return Candidate.of(Offer(name=name, backend=backend, capabilities=(record,)))


@pytest.fixture
def field(clock):
    """Two backends on one layout: "few" is quick with few rows, "many" with many, and "many" at prompts too."""
    few = taking(clock, lambda phase, rows: 1e-3 * (rows if phase == "decode" else 4))
    many = taking(clock, lambda phase, rows: 3e-3 if phase == "decode" else 2e-3)
    nhd = {"kv_layouts": frozenset({"nhd"})}
    return [offered("few", few, **nhd), offered("many", many, **nhd)]


def tuner(field, policy=None, one=None, **options):
    one = one or config()
    return Tuner(one, needs_of(one), field, policy or Policy(), CPU, rounds=3, cold_bytes=0, **options)


GRID = parse("decode:{1,2,8}x{8,24} extend:1x8")


def test_a_profile_changes_who_serves_by_phase_and_by_batch_size(field):
    tuning = tuner(field)
    profile = tuning.profile(tuning.run(GRID), HERE)
    policy = Policy(profile=profile.measurements(), by_batch=True)
    decision = negotiate(needs_of(), field, policy)
    assert [w.backend for w in decision.choice("all", "extend").winners] == ["many"]
    decode = decision.choice("all", "decode").winners
    assert [(w.max_batch, w.backend) for w in decode] == [(2, "few"), (None, "many")]
    assert decode[0].why == "measured 2000 µs a layer against 3000 µs of many, at up to 2 rows"
    assert decode[1].why == "measured 3000 µs a layer against 8000 µs of few, at more than 2 rows"
    assert [w.backend for w in negotiate(needs_of(), field).choice("all", "extend").winners] == ["few"]  # by name
    chosen = [line.strip() for line in explain(decision) if line.startswith("  decode ")]
    assert [line.partition(" (")[0] for line in chosen] == ["decode up to 2 rows: few", "decode beyond: many"]
    assert "measured 2000 µs a layer against 3000 µs of many, at up to 2 rows" in chosen[0]


def test_a_host_that_does_not_switch_has_one_backend_for_all_sizes_with_its_figures(field):
    tuning = tuner(field)
    measurements = tuning.profile(tuning.run(GRID), HERE).measurements()
    decision = negotiate(needs_of(), field, Policy(profile=measurements))
    (winner,) = decision.choice("all", "decode").winners
    assert winner.backend == "few"  # by seconds per token: 1, 1 and 1 against 3, 1.5 and 0.375
    assert winner.why.startswith("measured a layer in less time than many: 1000/3000 µs at up to 1 rows, 2000/3000 µs")
    (out,) = [o for o in decision.outranked if o.role == "decode"]
    assert out.why == f"few: {winner.why}"


def test_explicit_choices_and_policies_without_a_profile_win(field):
    tuning = tuner(field)
    measurements = tuning.profile(tuning.run(GRID), HERE).measurements()
    chosen = Policy(profile=measurements, by_batch=True, backends={"decode": "few"})
    (winner,) = negotiate(needs_of(), field, chosen).choice("all", "decode").winners
    assert (winner.backend, winner.max_batch) == ("few", None)
    assert winner.why.startswith("asked for")


def test_a_decision_by_batch_size_is_pinned_and_given_again(field):
    tuning = tuner(field)
    policy = Policy(profile=tuning.profile(tuning.run(GRID), HERE).measurements(), by_batch=True)
    decision = negotiate(needs_of(), field, policy)
    again = negotiate(needs_of(), field, decision.pin(Policy(), field))
    assert again.outcome == decision.outcome
    assert again.choice("all", "decode").winners[0].why == "asked for (the pinned decision)"


def test_only_what_the_user_left_open_is_measured(field):
    everything = {(c.name, c.need.role, c.configuration) for c in tuner(field).contestants()}
    assert everything == {(n, r, (16, "nhd")) for n in ("few", "many") for r in ("extend", "decode")}
    asked = Policy(backends={"decode": "few"}, page_size=4)
    narrowed = {(c.name, c.need.role, c.configuration) for c in tuner(field, asked).contestants()}
    assert narrowed == {("few", "decode", (4, "nhd")), ("few", "extend", (4, "nhd")), ("many", "extend", (4, "nhd"))}


def test_configurations_are_those_on_which_all_roles_can_be_served(clock):
    slow = taking(clock, lambda phase, rows: 2e-3)
    field = [
        offered("extends", slow, phases=frozenset({"extend"}), page_sizes=range(16, 65), kv_layouts=frozenset({"hnd"})),
        offered("decodes", slow, phases=frozenset({"decode"})),
        offered("small", slow, phases=frozenset({"decode"}), page_sizes=frozenset({1})),
    ]
    found = {(c.name, *c.configuration) for c in tuner(field).contestants()}
    assert found == {("extends", 16, "hnd"), ("decodes", 16, "hnd")}


def test_a_page_size_that_only_some_of_the_same_can_have_is_not_measured(clock):
    slow = taking(clock, lambda phase, rows: 2e-3)
    field = [
        offered("any", slow, page_sizes=range(1, 513)), offered("small", slow, page_sizes=range(1, 257)),
        offered("huge", slow, page_sizes=frozenset({1024})), offered("vast", slow, page_sizes=frozenset({512})),
    ]  # fmt: skip
    found = {(c.name, c.need.page_size) for c in tuner(field).contestants()}
    assert found == {("any", 16), ("small", 16), ("huge", 1024), ("any", 512), ("vast", 512)}


def test_a_budget_leaves_whole_workloads_out_and_says_how_many(field):
    tuned = tuner(field).run(GRID, budget=0.2)
    assert tuned.measured + tuned.left == 7
    assert tuned.left > 0
    keys = {(p.role, p.backend) for p in tuned.points}
    assert len(keys) == 4  # of each role something, on both
    with pytest.raises(HeadstockError, match=r"nothing was measured for extend; .*larger --budget"):
        tuner(field).run(GRID, budget=0.0)


def test_what_fails_is_left_out_and_told(field, clock):
    class Breaks(taking(clock, lambda phase, rows: 1e-3)):
        def init_forward_metadata(self, batch):
            if batch.num_reqs > 2:
                raise ValueError("no kernel for so many")
            super().init_forward_metadata(batch)

    nhd = {"kv_layouts": frozenset({"nhd"})}
    tuned = tuner([*field, offered("breaks", Breaks, **nhd)]).run(GRID)
    assert tuned.failures == {"breaks for decode": "breaks for decode, decode:8x8: ValueError: no kernel for so many"}
    assert {(p.backend, p.role) for p in tuned.points} >= {("breaks", "extend"), ("few", "decode")}
    assert ("breaks", "decode") not in {(p.backend, p.role) for p in tuned.points}


def test_a_workload_that_does_not_fit_is_left_out_by_name_and_no_backends_fault(field, monkeypatch):
    monkeypatch.setattr(Device, "free_memory", lambda self: 40_000)
    tuned = tuner(field).run(GRID)
    assert list(tuned.failures) == ["decode:8x24"]
    assert "a workload does not fit; given: decode:8x24" in tuned.failures["decode:8x24"]
    assert (tuned.measured, tuned.left) == (6, 0)
    assert len({(p.role, p.backend) for p in tuned.points}) == 4
    with pytest.raises(HeadstockError, match=r"nothing was measured for decode; .*decode:8x24.*another --grid"):
        tuner(field).run(parse("decode:8x24 extend:1x8"))


def point(**fields):
    usual = {"group": "all", "role": "decode", "backend": "few", "page_size": 16, "kv_layout": "nhd", "batch": 1,
             "tokens": 1, "context": 64, "seconds": 1e-3}  # fmt: skip
    return Point(**usual | fields)


def profile(**fields):
    usual = {"device": HERE.device, "driver": HERE.driver, "packages": VERSIONS, "shape": shape_of(needs_of())}
    return Profile(**usual | {"points": (point(),)} | fields)


def test_points_become_buckets_with_contexts_that_count_alike_and_the_plan_included():
    points = [
        point(seconds=1e-3), point(context=128, seconds=3e-3, plan=1e-3), point(batch=8, tokens=8, seconds=5e-3),
        point(role="extend", tokens=64, seconds=8e-3), point(role="extend", tokens=32, seconds=4e-3),
    ]  # fmt: skip
    found = profile(points=points).measurements()
    assert [(m.role, m.max_batch, m.tokens) for m in found] == [
        ("decode", 1, 1),
        ("decode", None, 8),
        ("extend", None, 48),
    ]
    assert [m.seconds for m in found] == pytest.approx([2e-3, 5e-3, 32**0.5 * 1e-3])


def test_a_lead_at_a_long_context_does_not_outweigh_a_larger_one_at_a_short_one():
    short, long = {"context": 128}, {"context": 1024}
    points = [point(seconds=0.4e-3, **short), point(seconds=5.3e-3, **long)]
    points += [point(backend="other", seconds=1.2e-3, **short), point(backend="other", seconds=4.2e-3, **long)]
    few, other = profile(points=points).measurements()
    assert few.seconds < other.seconds


def test_what_was_measured_on_fewer_workloads_is_not_compared():
    points = [point(), point(batch=8, tokens=8), point(backend="half")]
    assert {m.backend for m in profile(points=points).measurements()} == {"few"}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "profile.json"


def test_a_profile_survives_its_file_and_serves_its_own_machine(file):
    save(profile(), file)
    assert read(file) == profile()
    assert judge(file, HERE, VERSIONS, needs_of()) == (profile().measurements(), "", ())
    assert [each.name for each in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("machine", "versions", "needs", "said"),
    [
        (HERE._replace(device="another"), VERSIONS, {}, "it is of a CPU (2 cores), this is another"),
        (HERE, VERSIONS | {"torch": "2.14.0"}, {}, "packages have changed since: torch 2.13.0 → 2.14.0"),
        (HERE, VERSIONS | {"mine": "1.1"}, {}, "mine 1.0 → 1.1"),
        (HERE, VERSIONS, {"head_dim": 16}, "it is of a model of another shape"),
        (HERE, VERSIONS, {"num_key_value_heads": 4}, "another shape"),
        (HERE, VERSIONS, {"num_hidden_layers": 3}, "another shape"),
    ],
)
def test_another_machine_package_or_shape_has_no_use_for_it(file, machine, versions, needs, said):
    save(profile(), file)
    judged = judge(file, machine, versions, needs_of(config(**needs)))
    assert judged.measurements == ()
    assert said in judged.notice
    assert str(file) in judged.notice
    assert judged.notice.endswith("type: headstock tune")


def test_another_dtype_is_another_shape_and_another_context_is_not(file):
    save(profile(), file)
    assert judge(file, HERE, VERSIONS, needs_of(max_context=64)).measurements
    wider = requirements(config(), device="cpu", dtype="bfloat16")
    assert not judge(file, HERE, VERSIONS, wider).measurements
    assert default_file(HERE, wider) != default_file(HERE, needs_of())
    assert default_file(HERE, needs_of()) != default_file(HERE._replace(device="another"), needs_of())


def test_another_driver_is_warned_of_and_used(file):
    save(profile(), file)
    judged = judge(file, HERE._replace(driver="Linux 6.2"), VERSIONS, needs_of())
    assert judged.measurements == profile().measurements()
    assert "another driver (Linux 6.1 → Linux 6.2) and used all the same" in judged.notice


def test_a_package_that_is_gone_changes_nothing_about_the_others(file):
    save(profile(), file)
    rest = {name: version for name, version in VERSIONS.items() if name != "mine"}
    assert judge(file, HERE, rest, needs_of()).measurements
    assert changed({"a": "1"}, {"a": "2", "b": "1"}) == ["a 1 → 2"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is no profile"),
        ('{\n "version": 1', "is no profile: invalid JSON: EOF while parsing an object at line 2 column 13; type:"),
        ("[]", "is no profile"),
        ('{"version": 2}', "is no profile: version"),
        ('{"unknown": 1}', "is no profile"),
        (None, "cannot read"),
        (b"\xff\xfe\x00", "cannot read"),
    ],
)
def test_a_corrupt_file_is_named_and_ignored(file, content, said):
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    judged = judge(file, HERE, VERSIONS, needs_of())
    assert judged.measurements == ()
    assert str(file) in judged.notice
    assert said in judged.notice


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": -1.0},
        {"seconds": "NaN"},
        {"seconds": 1e300},
        {"plan": 1e300},
        {"page_size": 0},
        {"batch": "many"},
        {"x": 1},
    ],
)
def test_a_figure_that_cannot_be_is_a_corrupt_file(file, change):
    content = json.loads(profile().model_dump_json())
    content["points"][0] |= change
    file.write_text(json.dumps(content), encoding="utf-8")
    assert not judge(file, HERE, VERSIONS, needs_of()).measurements


def test_a_profile_of_other_options_is_named_and_ignored(file):
    save(profile(options={"few": {"splits": "8"}}), file)
    for other in ({}, {"few": {"splits": 4}}, {"few": {"splits": 8, "more": 1}}):
        judged = judge(file, HERE, VERSIONS, needs_of(), other)
        assert judged.measurements == ()
        assert "it was measured with other options of few" in judged.notice
    assert judge(file, HERE, VERSIONS, needs_of(), {"few": {"splits": 8}, "unmeasured": {"x": 1}}).measurements
    save(profile(), file)
    assert not judge(file, HERE, VERSIONS, needs_of(), {"few": {"splits": 8}}).measurements


def test_a_pipe_in_a_profiles_place_stays_and_so_does_a_link(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HeadstockError, match=r"cannot write .*pipe: it is a device or a pipe"):
        save(profile(), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "profile.json")
    (tmp_path / "far").mkdir()
    save(profile(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "far" / "profile.json") == profile()


def test_links_in_a_circle_are_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(HeadstockError, match=r"cannot write .*circle: Too many levels of symbolic links"):
        check_writable(tmp_path / "circle")


def test_a_profile_may_have_the_longest_name_that_a_file_can(tmp_path):
    save(profile(), file := tmp_path / ("p" * 255))
    assert read(file) == profile()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(HeadstockError, match="cannot write"):
        save(profile(), tmp_path / "file" / "profile.json")


def test_a_folder_in_a_profiles_place_is_refused_and_nothing_lies_beside_it(tmp_path):
    (tmp_path / "profile.json").mkdir()
    with pytest.raises(HeadstockError, match=r"cannot write .*profile.json: Is a directory"):
        save(profile(), tmp_path / "profile.json")
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]


def test_others_may_read_a_profile_as_they_may_any_new_file(tmp_path):
    (tmp_path / "usual").touch()
    save(profile(), tmp_path / "profile.json")
    assert (tmp_path / "profile.json").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert {each.name for each in tmp_path.iterdir()} == {"profile.json", "usual"}


def test_machines_are_known_by_processor_cores_and_kernel(tmp_path):
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nmodel name : A Very Fast One\n", encoding="utf-8")
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(line, encoding="utf-8")
    cpu = Machine.here("cpu", root=tmp_path)
    assert cpu.device.startswith("A Very Fast One (")
    assert cpu.driver
    assert Machine.here("cuda", root=tmp_path).driver == "570.86.15"
    assert Machine.here("meta") == ("meta", "")


def test_packages_are_the_host_torch_the_plugins_and_what_these_require():
    mine = Candidate.of(Offer(name="a", backend="a.b:C", capabilities=(CAPABILITIES,)))
    found = packages([mine.model_copy(update={"distribution": "jinja2"}), mine])
    assert {"headstock", "torch", "jinja2", "MarkupSafe"} <= found.keys()


def test_the_default_grid_is_within_the_limits():
    for batch, context, cpu in [(1, 16, True), (32, 8192, True), (256, 131072, False), (5, 100, False)]:
        grid = default_grid(batch, context, cpu)
        assert {load.phase for load in grid} == {"decode", "extend"}
        assert max(load.rows for load in grid) == batch
        assert max(load.context for load in grid) <= context


def test_budgets():
    assert [parse_budget(text) for text in ("60s", "2m", "1.5h", "90")] == [60.0, 120.0, 5400.0, 90.0]
    for text in ("", "fast", "10 parsecs", "-1s", "0s"):
        with pytest.raises(HeadstockError, match="60s, 5m, 1h"):
            parse_budget(text)
