"""The fused operations of a decoder against torch's, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch

from headstock.fusing import Fusing, fusing
from headstock.models.linear import Linear
from headstock.models.pointwise import Pointwise, pointwise
from headstock.models.rope import Rope
from headstock.models.rope_config import RopeConfig
from headstock.runner.refresh import Refresh, refresh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton must know before it is first imported
pytest.importorskip("triton")

from headstock.models.fused import Fused  # noqa: E402

EPS = 1e-5
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.float16, torch.bfloat16]


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(
        DEVICE, dtype
    )


def close(given: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(given.double(), want.double(), atol=5 * torch.finfo(given.dtype).eps, rtol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 100), (5, 4096)])
def test_norms_and_gates(dtype, tokens, width):
    x, delta, weight = (drawn(*shape, dtype=dtype) for shape in ((tokens, width), (tokens, width, 1), (width,)))
    delta = delta.squeeze(-1)
    want = Pointwise().norm(x.double(), weight.double(), EPS)
    close(Fused().norm(x, weight, EPS), want)

    class Given(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return delta.clone()

    hidden, normed = Fused().add_norm(x.clone(), Given(drawn(3, width)), x, weight, EPS)
    assert torch.equal(hidden, x + delta)
    close(normed, Pointwise().norm((x + delta).double(), weight.double(), EPS))
    gates = drawn(tokens, 2 * width, dtype=dtype)
    close(Fused().silu_gate(gates), Pointwise().silu_gate(gates.double()))


@pytest.mark.parametrize("tokens", [1, 3, 32])
def test_few_rows_are_split_along_what_is_summed(tokens):
    hidden, x = drawn(tokens, 128, dtype=torch.float16), drawn(tokens, 512, dtype=torch.float16)
    layer, weight = Linear(drawn(128, 512, dtype=torch.float16) / 16), drawn(128, dtype=torch.float16)
    want = hidden.double() + x.double() @ layer.weight.double().T
    total, normed = Fused().add_norm(hidden, layer, x, weight, EPS)
    close(total, want)
    close(normed, Pointwise().norm(want, weight.double(), EPS))


@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (192, 384), (256, 320), (10, 7)])  # blocks divide the first
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 32, 40])
def test_gates_of_a_product(tokens, bias, rows, columns):
    x, weight = drawn(tokens, columns, dtype=torch.float16), drawn(rows, columns, dtype=torch.float16) / 16
    layer = Linear(weight, drawn(rows, dtype=torch.float16) if bias else None)
    exact = Linear(weight.double(), None if layer.bias is None else layer.bias.double())
    close(Fused().gate(layer, x), Pointwise().gate(exact, x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (5, 64), (40, 128), (3, 96)])
def test_rotation_in_place_leaves_the_values_beside_it_alone(dtype, normed, heads, dim):
    qkv = drawn(3, heads + 2, dim, dtype=dtype)
    norm = drawn(heads, dim, dtype=dtype) if normed else None
    positions = torch.tensor([0, 7, 1000], device=DEVICE)
    rope = Rope(RopeConfig(rope_theta=10000.0), dim, DEVICE)
    tables = rope.tables(positions, dtype)
    exact = [table.double() for table in tables]
    want = Pointwise().rotate(qkv[:, :heads].double(), *exact, None if norm is None else norm.double(), EPS)
    values = qkv[:, heads:].clone()
    given = Fused().rotate(qkv[:, :heads], *tables, norm, EPS)
    close(given, want)
    assert given.data_ptr() == qkv.data_ptr()
    assert torch.equal(qkv[:, heads:], values)


def test_a_cpu_has_torchs_own():
    assert fusing(torch.device("cpu")) == Fusing(False)
    assert type(pointwise(torch.device("cpu"))) is Pointwise


def test_where_triton_runs_no_kernel_torchs_own_take_over_and_it_is_told_why(monkeypatch):
    def failing(self, gate_up):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(Fused, "silu_gate", failing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)  # of a GPU that need not be there
    device = torch.device("cuda", 7)
    assert not fusing(device).able
    assert fusing(device).fault.endswith("takes torch's own operations: Failed to find C compiler.")
    assert type(pointwise(device)) is Pointwise
    assert type(refresh(device)) is Refresh
