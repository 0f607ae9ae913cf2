"""Loading what was chosen: whatever departs from the contract is refused by name, before anything runs."""

from __future__ import annotations

import inspect
import sys

import pydantic
import pytest

from headstock import ANY, AttentionBackend, Capabilities, KVLayout, Offer
from headstock.errors import PluginError
from headstock.kv.layout import HND, NHD
from headstock.load import load_backend, load_layout, load_options, own_options
from headstock.offer import Candidate, Fault


def candidate(backend, name="mine", *, extra_inputs=(), **offer):
    capabilities = Capabilities(
        devices={"cpu"}, phases={"extend", "decode"}, attention={"paged"}, dtypes={"float32"}, head_dims=ANY,
        page_sizes=ANY, kv_layouts={"nhd"}, extra_inputs=frozenset(extra_inputs),
    )  # fmt: skip
    offered = Offer(name=name, backend=backend, capabilities=capabilities, **offer)
    return Candidate(name=name, offer=offered, distribution=f"{name}-dist", version="1.0")


class Good(AttentionBackend):
    """Keeps the contract, with helpers of its own."""

    forward_block_size = 64
    workspace_alignment = 256

    def init_forward_metadata(self, batch):
        batch.metadata = self._forward_plan(batch)

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        out.copy_(q)

    def _forward_plan(self, batch):
        return None

    def plan_pages(self, batch):
        return None

    @classmethod
    def workspace_bytes(cls, spec):
        return super().workspace_bytes(spec)


def refusal(backend, **offer):
    with pytest.raises(PluginError) as caught:
        load_backend(candidate(backend, **offer))
    message = str(caught.value)
    assert "\n" not in message
    assert "mine (mine-dist 1.0)" in message
    return message


def test_a_class_that_keeps_the_contract_loads_by_name_and_as_it_is(tmp_path, monkeypatch):
    assert load_backend(candidate(Good)) is Good
    source = inspect.getsource(Good).replace("class Good", "class Named")
    (tmp_path / "keeps_the_contract.py").write_text(
        f"from headstock import AttentionBackend\n{source}", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = load_backend(candidate("keeps_the_contract:Named"))
    assert (found.__name__, issubclass(found, AttentionBackend)) == ("Named", True)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_package_x.backend:Backend", "it imports 'no_such_package_x', which is not installed"),
        ("headstock.backend:NoSuchClass", "NoSuchClass"),
        ("exits_when_loaded:Backend", "SystemExit"),
    ],
)
def test_a_class_that_cannot_be_imported_is_refused_with_the_cause(target, said, tmp_path, monkeypatch):
    (tmp_path / "exits_when_loaded.py").write_text("raise SystemExit('no device')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError) as caught:
        load_backend(candidate(target))
    message = str(caught.value)
    assert said in message
    assert target in message
    assert "mine (mine-dist 1.0)" in message
    assert caught.value.__cause__ is not None


def test_an_interrupt_passes_and_what_is_printed_stays_out_of_standard_output(tmp_path, monkeypatch, capsys):
    (tmp_path / "slow_to_load.py").write_text("print('compiling')\nraise KeyboardInterrupt", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        load_backend(candidate("slow_to_load:Backend"))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "compiling\n")
    assert "slow_to_load" not in sys.modules


@pytest.mark.parametrize("backend", [dict, "json:loads"])
def test_what_is_no_backend_is_refused(backend):
    assert "no subclass of headstock.AttentionBackend" in refusal(backend)


def test_an_abstract_method_left_unwritten_is_named():
    class Half(AttentionBackend):
        def forward(self, q, k, v, layer, batch, *, out, lse=None): ...

    assert "it leaves init_forward_metadata unwritten" in refusal(Half)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("init_forward_metadta", "init_forward_metadata"),
        ("init_forward_metadata_capture", "init_forward_metadata_capture_cuda_graph"),
        ("forward_decode", "forward"),
        ("workspace_size", "workspace_bytes"),
        ("init_cuda_graphs_state", "init_cuda_graph_state"),
    ],
)
@pytest.mark.parametrize("kind", [lambda f: f, classmethod, staticmethod])
def test_a_public_method_that_looks_like_a_hook_and_is_none_is_a_misspelling(name, meant, kind):
    bad = type("Bad", (Good,), {name: kind(lambda *args: None)})
    message = refusal(bad)
    assert f"'{name}' is no hook" in message
    assert f"did you mean '{meant}'?" in message


def test_a_misspelling_in_a_base_class_is_found_too():
    base = type("Base", (Good,), {"forward_extend": lambda self: None})
    assert "'forward_extend' is no hook" in refusal(type("Derived", (base,), {}))


@pytest.mark.parametrize(("name", "arguments"), [("workspace_bytes", "self, spec"), ("prepare", "self, spec, report")])
def test_what_is_asked_of_the_class_has_to_be_of_the_class(name, arguments):
    hook = eval(f"lambda {arguments}: None")
    said = refusal(type("Plain", (Good,), {name: hook}))
    assert f"{name} is asked of the class" in said
    assert "put @classmethod above it" in said
    for kind in (classmethod, staticmethod):
        load_backend(candidate(type("Sound", (Good,), {name: kind(hook)})))


def test_extra_inputs_are_the_keyword_only_tensors_of_forward():
    class Sparse(Good):
        def forward(self, q, k, v, layer, batch, *, topk_indices, out, lse=None): ...

    assert load_backend(candidate(Sparse, extra_inputs=["topk_indices"])) is Sparse
    assert "extra inputs ['topk_indices'], its capabilities declare []" in refusal(Sparse)
    assert "extra inputs [], its capabilities declare ['topk_indices']" in refusal(Good, extra_inputs=["topk_indices"])


def test_a_forward_of_another_shape_is_refused():
    class NoLse(Good):
        def forward(self, q, k, v, layer, batch, *, out): ...

    class NoBatch(Good):
        def forward(self, q, k, v, layer, *, out, lse=None): ...

    class Anything(Good):
        def forward(self, *args, **kwargs): ...

    assert "'lse'" in refusal(NoLse)
    assert "forward cannot be called" in refusal(NoBatch)
    assert "any keyword" in refusal(Anything)


class Options(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    split_size: int = pydantic.Field(256, ge=1)
    upcast: bool = False


def test_options_are_validated_by_the_plugins_own_model():
    offer = candidate(Good, options=Options).offer
    assert load_options(offer, {}) == Options()
    assert load_options(offer, {"split_size": 32}) == Options(split_size=32)
    assert load_options(candidate(Good).offer, {}) is None


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        (Options, {"split_sise": 3}, ["no option 'split_sise'", "split_size"]),
        (Options, {"zzz": 3}, ["no option 'zzz'", "split_size, upcast"]),
        (Options, {"split_size": "many"}, ["options of mine: split_size", "'many'"]),
        (Options, {"split_size": 0}, ["split_size", "greater than or equal to 1"]),
        (None, {"split_size": 3}, ["mine has no options", "split_size"]),
        (dict, {}, ["no pydantic model"]),
        ("no_such_package_x:Options", {}, ["options of mine does not load", "not installed"]),
    ],
)
def test_options_that_are_wrong_are_refused_with_what_would_work(options, given, said):
    with pytest.raises(PluginError) as caught:
        load_options(candidate(Good, options=options).offer, given)
    message = str(caught.value)
    assert all(words in message for words in said), message
    assert "\n" not in message


@pytest.mark.parametrize("fault", [None, Fault(what="its package is missing")])
def test_options_are_checked_whether_or_not_their_backend_can_be_chosen(fault):
    mine = candidate(Good, options=Options).model_copy(update={"fault": fault})
    assert own_options({"mine": {"split_size": 32}}, [mine]) == {"mine": {"split_size": 32}}
    with pytest.raises(PluginError, match="no option 'splitsize'"):
        own_options({"mine": {"splitsize": 32}}, [mine])


def test_options_whose_model_is_broken_are_refused_unless_all_of_the_backend_is():
    mine = candidate(Good, options="nowhere_at_all:Options")
    with pytest.raises(PluginError, match="the options of mine does not load"):
        own_options({"mine": {"split_size": 32}}, [mine])
    broken = mine.failed(Fault(what="its package is missing"))
    assert own_options({"mine": {"split_size": 32}}, [broken]) == {"mine": {"split_size": 32}}


class Packed(NHD):
    """A layout that a plugin brings."""


def test_layouts_are_built_in_or_brought():
    assert load_layout("hnd", []) is HND
    bringing = candidate(Good, "other", kv_layouts={"packed": Packed})
    again = candidate(Good, "again", kv_layouts={"packed": Packed})
    assert load_layout("packed", [candidate(Good), bringing, again]) is Packed
    by_name = candidate(Good, kv_layouts={"tokens": "headstock.kv.layout:NHD"})
    assert load_layout("tokens", [by_name]) is NHD


class Unfinished(KVLayout):
    @classmethod
    def bytes_per_page(cls, spec):
        return 1


@pytest.mark.parametrize(
    ("brought", "said"),
    [
        ([], ["no plugin brings the KV layout 'packed'", "nhd, hnd, latent"]),
        ([{"packed": dict}], ["packed of p0-dist 1.0 is no KVLayout", "dict"]),
        ([{"packed": "json:dumps"}], ["packed of p0-dist 1.0 is no KVLayout"]),
        ([{"packed": "no_such_package_x:Layout"}], ["packed of p0-dist 1.0 does not load", "not installed"]),
        ([{"packed": Unfinished}], ["leaves view unwritten"]),
        (
            [{"packed": Packed}, {"packed": HND}],
            ["two plugins bring a KV layout 'packed'", "p0-dist 1.0 and p1-dist 1.0"],
        ),
    ],
)
def test_a_layout_that_is_none_or_could_be_either_is_refused(brought, said):
    field = [candidate(Good, f"p{i}", kv_layouts=layouts) for i, layouts in enumerate(brought)]
    with pytest.raises(PluginError) as caught:
        load_layout("packed", field)
    assert all(words in str(caught.value) for words in said), str(caught.value)
