"""The fused operations of a decoder against torch's, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from headstock.models.linear import Linear
from headstock.models.pointwise import Pointwise, pointwise
from headstock.models.rope import Rope
from headstock.models.rope_config import RopeConfig

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
    assert type(pointwise(torch.device("cpu"))) is Pointwise
