"""A library with an MLA kernel for one page size, one GPU and decode alone, as a plugin beside general ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import headstock_torch_native
import headstock_triton
from headstock import (
    ANY,
    AttentionBackend,
    AttentionLayer,
    BackendSpec,
    Capabilities,
    ForwardBatch,
    Offer,
    Workspace,
    hookimpl,
)
from headstock.negotiate import Decision, Policy, Requirement, negotiate
from headstock.testing import MLAConformance
from headstock.testing.laws import other_reads_what_was_written
from headstock_torch_native.backend import TorchNative

PAGE = 64

# ---- the library: a stand-in with the habits of one that is written for a single GPU


def library_decode(
    q: Tensor, cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int, softmax_scale: float | None
) -> tuple[Tensor, Tensor]:
    """q [B, n, Hq, D], cache [blocks, 64, 1, D] → out [B, n, Hq, Dv], lse [B, Hq, n] natural.

    Its default scale is that of the latent's width, which is no model's. Lengths count the new tokens.
    """
    assert cache.shape[1] == PAGE, f"page_block_size must be {PAGE}"
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rows, n = q.shape[:2]
    keys = cache[block_table.long()].flatten(1, 2)[:, :, 0].float()
    at = torch.arange(keys.shape[1])
    keys = keys.masked_fill((at >= cache_seqlens[:, None])[:, :, None], 0.0)
    last = cache_seqlens[:, None] - n + torch.arange(n)
    scores = torch.einsum("bnhd,bsd->bhns", q.float(), keys) * scale
    scores = scores.masked_fill(at > last[:, None, :, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    out = torch.einsum("bhns,bsv->bnhv", weights, keys[..., :head_dim_v])
    return out.to(q.dtype).view(rows, n, -1, head_dim_v), lse


# ---- the plugin


class Page64Decode(AttentionBackend):
    """The library's kernel behind the contract: the model's scale is given, and its log-sum-exp turned."""

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        super().__init__(spec, workspace)
        OFFER.check(spec)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        return

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, *,
        out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        if k is not None and batch.out_cache_loc is not None:
            layer.kv.write(k, v, batch.out_cache_loc)
        result, total = library_decode(
            q.unflatten(0, (batch.num_reqs, -1)), layer.kv.latent[:, :, None], batch.page_table, batch.seq_lens,
            self.spec.v_head_dim, self.spec.scale,
        )  # fmt: skip
        out.copy_(result.flatten(0, 1))
        if lse is not None:
            lse.copy_(total.transpose(1, 2).flatten(0, 1))


DECODE: dict[str, Any] = {
    "phases": {"decode"}, "attention": {"mla"}, "head_dims": {576}, "v_head_dims": {512}, "page_sizes": {PAGE},
    "kv_layouts": {"latent"}, "query_lens": ANY, "lse": True, "preference": 10.0,
}  # fmt: skip
OFFER = Offer(
    name="page64-mla",
    backend=Page64Decode,
    capabilities=(
        Capabilities(
            **DECODE,
            devices={"cuda"},
            dtypes={"bfloat16", "float16"},
            compute_capability={90},
            graph=True,
            label="sm_90",
        ),
        Capabilities(**DECODE, devices={"cpu"}, dtypes={"float32"}, label="the stand-in"),
    ),
)


@hookimpl
def attention_backends() -> list[Offer]:
    return [OFFER]


class TestPage64(MLAConformance):
    backend = OFFER
    quick = (
        "*-of-*",
        "*-absorbs-*",
        "*-merges-*",
        "*-alone-*",
        "*-strides-*",
        "*-query-len-*",
        "*-heads-3",
        "*-head_dims-*",
    )


def test_what_another_backend_cached_it_goes_on_from():
    sizes = {"num_heads": 16, "head_dim": 576, "v_head_dim": 512, "page_size": PAGE}
    fields = {"attention": "mla", "query_lens": (70,), "seq_lens": (70,), "phase": "extend", **sizes}
    other_reads_what_was_written(TorchNative, Page64Decode, {**fields, "reader": "decode"})


# ---- negotiation

TRITON, NATIVE = headstock_triton.OFFER, headstock_torch_native.OFFER


def deepseek(capability: int = 90, **fields: Any) -> list[Requirement]:
    """What an MLA model of DeepSeek's sizes asks: decode, and one of the two forms of extend at least."""
    common = {
        "device": "cuda", "compute_capability": capability, "dtype": "bfloat16", "kv_dtype": "bfloat16",
        "num_heads": 128, "max_context": 4096,
    }  # fmt: skip
    latent = {"attention": "mla", "head_dim": 576, "v_head_dim": 512, "num_kv_heads": 1, **fields}
    given = {"attention": "ragged", "head_dim": 192, "v_head_dim": 128, "num_kv_heads": 128, "lse": True}
    return [
        Requirement(role="extend", phase="extend", either="prefill", **common, **latent),
        Requirement(role="expand", phase="extend", either="prefill", **common, **given),
        Requirement(role="decode", phase="decode", **common, **latent, wishes=("graph",), query_lens=frozenset({1})),
    ]


def served(decision: Decision) -> Mapping[str, str]:
    return {choice.role: winner.backend for choice in decision.choices for winner in choice.winners}


def offers_latents(name: str, **changes: Any) -> Offer:
    """A backend that extends over latents, with these page sizes and no more."""
    can = DECODE | {"phases": {"extend"}, "devices": {"cuda"}, "dtypes": {"bfloat16"}, "preference": 0.0} | changes
    return Offer(name=name, backend="a.b:C", capabilities=(Capabilities(**can),))


@pytest.mark.parametrize("others", [[TRITON], [NATIVE], [TRITON, NATIVE]])
def test_it_decodes_another_extends_and_both_have_its_page_size(others):
    decision = negotiate(deepseek(), [*others, OFFER])
    assert decision.page_size == PAGE
    assert served(decision)["decode"] == "page64-mla"
    assert served(decision)["extend"] in {each.name for each in others}
    assert served(decision)["expand"] in {each.name for each in others}


def reasons(decision: Decision, role: str, backend: str) -> set[str]:
    """What keeps a backend from a role, axis by axis, in words."""
    return {
        str(mismatch)
        for refusal in decision.refused
        if (refusal.role, refusal.backend) == (role, backend)
        for near in refusal.nearest
        for mismatch in near.mismatches
    }


def test_on_another_gpu_it_is_refused_for_that_and_has_no_say_in_the_page_size():
    decision = negotiate(deepseek(80), [TRITON, OFFER])
    assert set(served(decision).values()) == {"triton"}
    assert "compute_capability: needs 80, offers {90}" in reasons(decision, "decode", "page64-mla")
    assert decision.page_size == negotiate(deepseek(80), [TRITON]).page_size


def test_a_page_size_that_was_asked_for_goes_before_it():
    decision = negotiate(deepseek(), [TRITON, OFFER], Policy(page_size=32))
    assert served(decision)["decode"] == "triton"
    assert "page_sizes: needs 32 (asked for), offers {64}" in reasons(decision, "decode", "page64-mla")


def test_page_sizes_that_never_meet_are_said_as_such():
    decision = negotiate(deepseek(), [OFFER, offers_latents("page-one", page_sizes={1})])
    assert not decision.solved
    for word in ("page64-mla", "page-one", "64", "page size"):
        assert word in decision.conflict


def test_page_sizes_that_meet_are_settled_for_both():
    decision = negotiate(deepseek(), [OFFER, offers_latents("extender", page_sizes={16, 64, 128})])
    assert (decision.page_size, served(decision)) == (PAGE, {"extend": "extender", "decode": "page64-mla"})


def test_a_plain_model_never_gets_it_and_an_mla_model_no_plain_backend():
    plain = [
        need.model_copy(update={"attention": "paged", "head_dim": 128, "v_head_dim": 128, "num_kv_heads": 8})
        for need in deepseek()
        if need.role != "expand"
    ]
    assert set(served(negotiate(plain, [OFFER, TRITON])).values()) == {"triton"}
    paged = Offer(name="paged-only", backend="a.b:C", capabilities=(TRITON.capabilities[0],))
    decision = negotiate(deepseek(), [paged])
    assert not decision.solved
    assert reasons(decision, "decode", "paged-only") >= {"attention: needs mla, offers {paged, ragged}"}
    assert "page64-mla" not in served(negotiate(plain, [OFFER])).values()
