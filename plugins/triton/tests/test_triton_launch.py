"""What is found out once and remembered: the code compiled for arguments of a kind, and where a layer's cache lies."""

from __future__ import annotations

import gc
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import triton

from headstock.testing.problem import Result, make_problem
from headstock.testing.rig import Rig
from headstock_triton.backend import TritonAttention
from headstock_triton.launch import KINDS, Launch, kind
from headstock_triton.table import compiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(not compiles(triton.__version__), reason="a release in which Triton is always asked")
def test_arguments_of_a_kind_are_the_same_to_triton():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    numbers = [*range(-40, 40), *(2**n + i for n in (4, 15, 30, 31, 32) for i in (-17, -16, -1, 0, 1))]
    floats = [0.0, 1.0, 16.0, -1.0, 0.5, 1e300, float("inf")]
    memory = torch.zeros(512, dtype=torch.uint8)
    dtypes = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2)
    tensors = [memory[at:].view(dtype) for dtype in dtypes for at in range(0, 128, dtype.itemsize)]
    seen = defaultdict(set)
    for x in [None, *numbers, *floats, *tensors, *descriptors()]:
        seen[kind(x)].add(native_specialize_impl(BaseBackend, x, False, True, True))
    assert [(told, found) for told, found in seen.items() if len(found) > 1] == []
    assert len(seen) < len(numbers) + len(dtypes) * 16 + 10  # and floats are all alike, tensors by their place in 16


def descriptors():
    """Descriptors of other memory, dtypes, shapes and boxes, of one layout."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return [
        TensorDescriptor(torch.zeros(rows, 128, dtype=dtype), [rows, 128], [128, 1], box, layout)
        for rows in (1, 16, 17) for dtype in (torch.float16, torch.bfloat16) for box in ([8, 64], [16, 64])
    ]  # fmt: skip


@pytest.fixture
def ran(monkeypatch):
    """What a kernel `f` was run with that has arguments x, n and scale and a constant SIZE, and how it was found."""
    ran = []

    class Function:
        """A kernel of Triton's: a launch returns what it compiled, which can be launched too."""

        def __init__(self):
            self.arg_names = ["x", "n", "scale", "SIZE"]

        def __getitem__(self, grid):
            return lambda *given, **named: ran.append(("looked up", grid, *given, named)) or Compiled()

    class Compiled:
        def __getitem__(self, grid):
            return lambda *given: ran.append(("direct", grid, *given))

    monkeypatch.setattr("headstock_triton.launch.INTERPRETING", False)
    monkeypatch.setattr("headstock_triton.launch.KNOWN", True)
    monkeypatch.setattr("headstock_triton.launch.KERNELS", {"f": Function()})
    return ran


def test_triton_is_asked_once_for_each_kind_of_arguments(ran):
    launch, memory = Launch("f", {"OTHER": 1, "SIZE": 4}, num_warps=2), torch.zeros(64)
    named = {"SIZE": 4, "num_warps": 2, "enable_fp_fusion": True}
    for x, n, scale, known in [
        (memory, 3, 0.5, False), (memory[8:], 3, 1.0, True), (memory[4:], 3, 2.0, True), (memory[1:], 3, 0.5, False),
        (memory, 1, 0.5, False), (memory.int(), 3, 0.5, False), (None, 3, 0.5, False), (memory, 3, 0.5, True),
    ]:  # fmt: skip
        launch((7,), {"scale": scale, "x": x, "n": n, "more": 1})
        what, grid, *given = ran.pop()
        assert given[0] is x
        direct = ("direct", (7, 1, 1), [n, scale, 4])
        assert (what, grid, given[1:]) == (direct if known else ("looked up", (7,), [n, scale, named]))
    assert not ran


def test_kinds_that_do_not_come_again_are_not_kept_for_ever(ran):
    launch, memory = Launch("f", {"SIZE": 4}), torch.zeros(64)
    for n in range(2, 5000):
        for _ in range(2):
            launch((1,), {"x": memory, "n": n, "scale": 1.0})
    assert [what for what, *_ in ran] == ["looked up", "direct"] * 4998
    assert len(launch._compiled) <= KINDS


@pytest.mark.parametrize("attention", ["paged", "mla"])
def test_layers_of_one_instance_have_their_own_caches(attention):
    """One after the other and back, by one plan, with other memory, scales, and views that become others."""
    fields = {"num_heads": 4, "num_kv_heads": 1} if attention == "mla" else {}
    problem = make_problem([2, 1], [40, 17], device=DEVICE, attention=attention, phase="extend", k_scale=0.5, **fields)
    rig, batch = Rig(TritonAttention, problem.spec), problem.fresh()[0]
    rig.plan(batch)
    other = replace(problem, k_scale=2.0, v_scale=0.25)
    first, again, scaled = ((each, *cached(each)) for each in (problem, problem, other))
    for each in (first, scaled, again, first, scaled):
        check(rig, batch, *each)
    view, (layer, storage) = first[1].kv, cached(problem)
    for name in ("latent",) if attention == "mla" else ("k", "v"):
        setattr(view, name, getattr(layer.kv, name))
    check(rig, batch, problem, first[1], storage)
    check(rig, batch, other, replace(first[1], k_scale=2.0, v_scale=0.25), storage)
    assert len(rig.instance.caches) == 3


def cached(problem):
    """A layer with a cache of its own, and its memory."""
    storage = problem.fresh()[1]
    return problem.layer(storage), storage


def check(rig, batch, problem, layer, storage):
    """Runs a layer, and compares with float64 what it gives and leaves in its cache."""
    storage.copy_(problem.storage)
    shape = (*problem.q.shape[:2], problem.spec.v_head_dim)
    out = torch.full(shape, torch.nan, dtype=problem.q.dtype, device=DEVICE)
    rig.instance.forward(problem.q, problem.k, problem.v, layer, batch, out=out)
    problem.compare(Result(out, None, storage))


def test_a_cache_that_is_gone_is_not_kept():
    problem = make_problem([1], [20], device=DEVICE)
    rig, (batch, storage) = Rig(TritonAttention, problem.spec), problem.fresh()
    rig.plan(batch)
    layer = problem.layer(storage)
    rig.instance.forward(problem.q, problem.k, problem.v, layer, batch, out=torch.empty_like(problem.q))
    assert len(rig.instance.caches) == 1
    del layer
    gc.collect()
    assert len(rig.instance.caches) == 0
