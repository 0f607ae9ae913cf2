"""Caches of legal but unusual strides, which only a backend that honours strides can read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from headstock.backend import BackendSpec
from headstock.device import torch_dtype
from headstock.kv.layout import KVLayout, KVView, LatentView, PagedView

FAR = 2**30 + 64
"""Elements from one page to the next: the third page of a cache begins past 2³¹."""


class PackedKV(KVLayout):
    """Tokens first, a key and its value in one row: a page is [page, Hkv, D + Dv]."""

    @classmethod
    def bytes_per_page(cls, spec: BackendSpec) -> int:
        row = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
        return spec.page_size * row * torch_dtype(spec.kv_dtype).itemsize

    @classmethod
    def view(cls, storage: Tensor, spec: BackendSpec, k_scale: float, v_scale: float) -> KVView:
        shape = (-1, spec.page_size, spec.num_kv_heads, spec.head_dim + spec.v_head_dim)
        rows = storage.view(torch_dtype(spec.kv_dtype)).view(shape)
        return PagedView(rows[..., : spec.head_dim], rows[..., spec.head_dim :], k_scale, v_scale)


class Far(KVLayout):
    """Tokens first as in nhd, with `FAR` elements from page to page."""

    @classmethod
    def bytes_per_page(cls, spec: BackendSpec) -> int:
        return FAR * torch_dtype(spec.kv_dtype).itemsize

    @classmethod
    def view(cls, storage: Tensor, spec: BackendSpec, k_scale: float, v_scale: float) -> KVView:
        elements = storage.view(torch_dtype(spec.kv_dtype))
        k_size = spec.page_size * spec.num_kv_heads * spec.head_dim
        v_size = spec.page_size * spec.num_kv_heads * spec.v_head_dim
        shape = (-1, spec.page_size, spec.num_kv_heads)
        k = elements[:, :k_size].view(*shape, spec.head_dim)
        v = elements[:, k_size : k_size + v_size].view(*shape, spec.v_head_dim)
        return PagedView(k, v, k_scale, v_scale)


class WideLatent(KVLayout):
    """A page is [page, R + P + 8]: latents with something else of the host's between them."""

    @classmethod
    def bytes_per_page(cls, spec: BackendSpec) -> int:
        return spec.page_size * (spec.head_dim + 8) * torch_dtype(spec.kv_dtype).itemsize

    @classmethod
    def view(cls, storage: Tensor, spec: BackendSpec, k_scale: float, v_scale: float) -> KVView:
        rows = storage.view(torch_dtype(spec.kv_dtype)).view(-1, spec.page_size, spec.head_dim + 8)
        return LatentView(rows[..., : spec.head_dim], k_scale)


class FarLatent(Far):
    """Latents with `FAR` elements from page to page."""

    @classmethod
    def view(cls, storage: Tensor, spec: BackendSpec, k_scale: float, v_scale: float) -> KVView:
        elements = storage.view(torch_dtype(spec.kv_dtype))
        latent = elements[:, : spec.page_size * spec.head_dim].view(-1, spec.page_size, spec.head_dim)
        return LatentView(latent, k_scale)


PACKED: Mapping[str, type[KVLayout]] = MappingProxyType({"paged": PackedKV, "mla": WideLatent})
"""Caches whose rows hold more than a key, by attention kind."""
DISTANT: Mapping[str, type[KVLayout]] = MappingProxyType({"paged": Far, "mla": FarLatent})
"""Caches whose pages are far apart, by attention kind."""
