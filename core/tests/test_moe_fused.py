"""The fused router and experts against torch's forms in float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from headstock.models.deepseek_config import MoEConfig
from headstock.models.moe import Experts, Router
from headstock.models.pointwise import Pointwise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton must know before it is first imported
pytest.importorskip("triton")

from headstock.models.moe_fused import FEW, FusedExperts, FusedRouter  # noqa: E402

DTYPE = torch.float16 if DEVICE == "cpu" else torch.bfloat16
ROUTINGS = {
    "V2-Lite": MoEConfig(num_experts=64, top_k=6, intermediate_size=1, shared_size=1, scoring="softmax"),
    "V2": MoEConfig(
        num_experts=160, top_k=6, intermediate_size=1, shared_size=1, scoring="softmax", num_groups=8, top_groups=3,
        scaling=16.0,
    ),
    "V3": MoEConfig(
        num_experts=256, top_k=8, intermediate_size=1, shared_size=1, scoring="sigmoid", num_groups=8, top_groups=4,
        normalised=True, scaling=2.5,
    ),
    "one group of few": MoEConfig(
        num_experts=6, top_k=1, intermediate_size=1, shared_size=1, scoring="sigmoid", normalised=True
    ),
    "odd groups": MoEConfig(
        num_experts=15, top_k=2, intermediate_size=1, shared_size=1, scoring="sigmoid", num_groups=5, top_groups=1
    ),
}  # fmt: skip


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


class Exact(Router):
    """Torch's router, in float64."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x.float = x.double
        return super().__call__(x)


def router(kind: type[Router], config: MoEConfig, width: int, dtype: torch.dtype) -> Router:
    bias = drawn(config.num_experts, seed=2) / 8 if config.scoring == "sigmoid" else None
    weight = drawn(config.num_experts, width, seed=1).float() / 8
    return kind(config, weight.to(dtype), None if bias is None else bias.float().to(dtype))


def dense(config: MoEConfig, weights: Tensor, experts: Tensor) -> Tensor:
    """A token's weight for every expert, [T, E]."""
    return torch.zeros(len(weights), config.num_experts, dtype=torch.float64, device=DEVICE).scatter_(
        1, experts, weights.double()
    )


@pytest.mark.parametrize(("tokens", "dtype"), [(1, DTYPE), (3, torch.float32), (9, DTYPE), (FEW + 1, DTYPE)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_router_chooses_as_torch_does(name, tokens, dtype):
    config, x = ROUTINGS[name], drawn(tokens, 600).to(dtype)
    weights, experts = router(FusedRouter, config, 600, torch.float32)(x)
    exact, best = router(Exact, config, 600, torch.float64)(x.clone())
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    assert torch.equal(experts.sort(-1).values, best.sort(-1).values)
    torch.testing.assert_close(dense(config, weights, experts), dense(config, exact, best), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_token_that_is_no_number_chooses_experts_that_exist_and_harms_no_other(name, poison):
    config, x = ROUTINGS[name], drawn(3, 40).to(DTYPE)
    choice = router(FusedRouter, config, 40, torch.float32)
    whole, own = choice(x)
    x[1] = poison
    weights, experts = choice(x)
    for row in experts.tolist():
        assert len({expert for expert in row if 0 <= expert < config.num_experts}) == config.top_k
    assert weights[1].isnan().all()
    assert torch.equal(weights[::2], whole[::2])
    assert torch.equal(experts[::2], own[::2])


def layer(count: int, hidden: int, inner: int) -> FusedExperts:
    gate_up, down = drawn(count, 2 * inner, hidden, seed=1) / 8, drawn(count, inner, hidden, seed=2) / 8
    return FusedExperts(gate_up.to(DTYPE), down.to(DTYPE), Pointwise())


def close(layer: FusedExperts, hidden: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The sum, checked; what is new in memory is NaN before it is written."""
    exact = Experts(layer.gate_up.double(), layer.down.double(), Pointwise())
    want = hidden.double() + exact._sorted(x.double(), weights.double(), chosen)
    with pytest.MonkeyPatch.context() as patch:
        made = Tensor.new_empty

        def poisoned(self: Tensor, *shape: int, **how) -> Tensor:
            new = made(self, *shape, **how)
            return new.fill_(torch.nan) if new.is_floating_point() else new

        patch.setattr(Tensor, "new_empty", poisoned)
        given = layer.add_to(hidden.clone(), x, weights, chosen)
    assert given.dtype == hidden.dtype
    torch.testing.assert_close(given.double(), want, atol=8 * torch.finfo(DTYPE).eps, rtol=0.01)
    return given


@pytest.mark.parametrize(
    ("count", "top_k", "hidden", "inner"),
    [(8, 1, 128, 128), (8, 2, 256, 128), (64, 6, 128, 128), (160, 6, 128, 128), (8, 8, 128, 256), (8, 2, 192, 128),
     (8, 2, 128, 72), (7, 3, 10, 6)],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 3, 17, FEW + 1])
def test_experts_add_the_sum_over_a_tokens_own(tokens, count, top_k, hidden, inner):
    """Of blocks that divide the weights, and of the last three, which they do not."""
    experts = layer(count, hidden, inner)
    assert experts.fusible == (hidden % 128 == inner % 128 == 0)
    chosen = drawn(tokens, count, seed=5).topk(top_k).indices
    weights = drawn(tokens, top_k, seed=4).float()
    close(experts, drawn(tokens, hidden, seed=3).to(DTYPE), drawn(tokens, hidden).to(DTYPE) / 4, weights, chosen)


@pytest.mark.parametrize("chosen", [[0, 1], [7, 3]])
@pytest.mark.parametrize("tokens", [2, 9])
def test_all_tokens_may_choose_the_same_experts_and_none_of_what_nobody_chose_is_read(tokens, chosen):
    experts, weights = layer(8, 128, 128), drawn(tokens, 2, seed=4).float()
    expected = torch.tensor([chosen] * tokens, device=DEVICE)
    for row in range(0, tokens, 2):
        expected[row] = expected[row].flip(0)
    x, hidden = drawn(tokens, 128).to(DTYPE) / 4, drawn(tokens, 128, seed=3).to(DTYPE)
    given = close(experts, hidden, x, weights, expected)
    others = [expert for expert in range(8) if expert not in chosen]
    experts.gate_up[others], experts.down[others] = torch.nan, torch.nan
    assert torch.equal(experts.add_to(hidden.clone(), x, weights, expected), given)


def test_a_tokens_bits_are_the_same_alone_and_among_others():
    """Alone, programs go by pairs; together, by experts and over more columns. One of the others is no number."""
    experts, choice = layer(8, 256, 128), router(FusedRouter, ROUTINGS["one group of few"], 256, torch.float32)
    x, hidden = drawn(FEW, 256).to(DTYPE) / 4, drawn(FEW, 256, seed=3).to(DTYPE)
    chosen, weights = drawn(FEW, 8, seed=5).topk(2).indices, drawn(FEW, 2, seed=4).float()
    x[1] = torch.nan
    together, shares = experts.add_to(hidden.clone(), x, weights, chosen), choice(x)[0]
    assert together[1].isnan().all()
    assert together[2:].isfinite().all()
    for row in (0, 2, 31):
        of = slice(row, row + 1)
        assert torch.equal(experts.add_to(hidden[of].clone(), x[of], weights[of], chosen[of]), together[of])
        assert torch.equal(choice(x[of])[0], shares[of])


def test_rows_may_lie_apart():
    experts, config = layer(8, 128, 128), ROUTINGS["one group of few"]
    wide, chosen = drawn(3, 256, seed=6).to(DTYPE), torch.tensor([[1, 0], [5, 2], [7, 1]], device=DEVICE)
    x, hidden, weights = wide[:, :128], wide[:, 128:].clone(), drawn(3, 2, seed=4).float()
    close(experts, hidden, x, weights, chosen)
    choice = router(FusedRouter, config, 128, torch.float32)
    assert torch.equal(choice(x)[0], choice(x.contiguous())[0])
    given = experts.add_to(wide[:, 128:], x.clone(), weights, chosen)
    assert given.data_ptr() == wide[:, 128:].data_ptr()
    torch.testing.assert_close(given, experts.add_to(hidden, x.clone(), weights, chosen))
