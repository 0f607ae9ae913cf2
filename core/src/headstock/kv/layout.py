"""KV layouts: how the keys and values of a page lie in its bytes, and the views a backend reads and writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headstock.device import torch_dtype

if TYPE_CHECKING:
    from headstock.backend import BackendSpec


class KVView(ABC):
    """One layer's cache in logical order, whatever the layout underneath.

    `loc` is an int64 tensor [N] of slots, slot = page × page_size + offset. Values are stored in `kv_dtype` as
    x / scale, rounded to nearest even and saturated where the dtype is FP8.
    """

    @abstractmethod
    def write(self, k: Tensor, v: Tensor | None, loc: Tensor) -> None:
        """Stores k [N, Hkv, D] and v [N, Hkv, Dv] (None for a latent cache) into the slots `loc` and nowhere else."""

    @abstractmethod
    def gather(self, loc: Tensor) -> tuple[Tensor, Tensor | None]:
        """Copies slots out as stored, scales not applied: k [N, Hkv, D], v [N, Hkv, Dv] (None for a latent cache)."""


class PagedView(KVView):
    """Keys and values per head: `k` [pages, page, Hkv, D] and `v` [pages, page, Hkv, Dv], last stride 1."""

    def __init__(self, k: Tensor, v: Tensor, k_scale: float = 1.0, v_scale: float = 1.0):
        self.k, self.v = k, v
        self.k_scale, self.v_scale = k_scale, v_scale
        self._k_slots, self._v_slots = _Slots(k), _Slots(v)
        self._alike = k.shape == v.shape and k.stride() == v.stride()

    def write(self, k: Tensor, v: Tensor | None, loc: Tensor) -> None:
        """Stores k [N, Hkv, D] and v [N, Hkv, Dv] into the slots `loc` int64 [N] and nowhere else."""
        assert v is not None, "a paged cache stores values too"
        rows = self._k_slots.find(loc)
        self._k_slots.put(encode(k, self.k.dtype, self.k_scale), rows)
        self._v_slots.put(encode(v, self.v.dtype, self.v_scale), rows if self._alike else self._v_slots.find(loc))

    def gather(self, loc: Tensor) -> tuple[Tensor, Tensor | None]:
        """Copies slots out as stored, scales not applied: k [N, Hkv, D] and v [N, Hkv, Dv]."""
        rows = self._k_slots.find(loc)
        return self._k_slots.take(rows), self._v_slots.take(rows if self._alike else self._v_slots.find(loc))


class _Slots:
    """A strided [pages, page, H, D] tensor as one column of rows, the longest that divide every stride.

    One index then finds a slot: a third of the time that a pair of indices takes, page and offset. A slot is one row
    where its heads lie together, a row per head where they are apart, and a few where K and V differ in size.
    """

    def __init__(self, x: Tensor):
        pages, self.page_size, heads, dim = x.shape
        per_page, per_slot, per_head, _ = x.stride()
        if heads == 1 or per_head == dim:
            row = gcd(per_page, per_slot, heads * dim)
            parts = torch.arange(0, heads * dim, row)
        else:
            row = gcd(per_page, per_slot, per_head, dim)
            parts = (torch.arange(heads)[:, None] * per_head + torch.arange(0, dim, row)).flatten()
        extent = (pages - 1) * per_page + (self.page_size - 1) * per_slot + int(parts[-1]) + row
        self.whole = len(parts) == 1  # one row holds a slot
        shape = (extent // row, heads, dim) if self.whole else (extent // row, row)
        rows = x.as_strided(shape, (row, dim, 1) if self.whole else (row, 1))
        self.rows = rows.view(torch.uint8) if x.itemsize == 1 else rows  # torch moves FP8 only as plain bytes
        self.dtype, self.slot = x.dtype, (heads, dim)
        self.step, self.gap = per_slot // row, (per_page - self.page_size * per_slot) // row
        self.parts = (parts // row).to(x.device)

    def find(self, loc: Tensor) -> Tensor:
        """Slots [N] → the rows that hold them, slot by slot."""
        rows = torch.add(loc if self.step == 1 else loc * self.step, loc // self.page_size, alpha=self.gap)
        return rows if self.whole else (rows[:, None] + self.parts).flatten()

    def put(self, x: Tensor, rows: Tensor) -> None:
        x = x if self.rows.dtype == x.dtype else x.view(self.rows.dtype)
        self.rows.index_copy_(0, rows, x if self.whole else x.reshape(len(rows), -1))

    def take(self, rows: Tensor) -> Tensor:
        x = self.rows.index_select(0, rows)
        x = x if self.rows.dtype == self.dtype else x.view(self.dtype)
        return x if self.whole else x.view(-1, *self.slot)


class LatentView(KVView):
    """One compressed vector per token, shared by all heads: `latent` [pages, page, R + P], the rope part last."""

    def __init__(self, latent: Tensor, scale: float = 1.0):
        self.latent, self.scale = latent, scale
        self._slots = _Slots(latent[:, :, None])

    def write(self, k: Tensor, v: Tensor | None, loc: Tensor) -> None:
        """Stores k [N, 1, R + P] into the slots `loc` int64 [N] and nowhere else; v is None."""
        assert v is None, "a latent cache holds no separate values"
        self._slots.put(encode(k, self.latent.dtype, self.scale), self._slots.find(loc))

    def gather(self, loc: Tensor) -> tuple[Tensor, Tensor | None]:
        """Copies slots out as stored: k [N, 1, R + P], and None."""
        return self._slots.take(self._slots.find(loc)), None


class KVLayout(ABC):
    """A named arrangement of a page's bytes. A plugin may bring its own; the name is opaque to the host.

    Storage is uint8 [num_pages, bytes_per_page] for one layer.
    """

    @classmethod
    @abstractmethod
    def bytes_per_page(cls, spec: BackendSpec) -> int:
        """Bytes that one page of one layer takes."""

    @classmethod
    @abstractmethod
    def view(cls, storage: Tensor, spec: BackendSpec, k_scale: float, v_scale: float) -> KVView:
        """The cache view over `storage` uint8 [num_pages, bytes_per_page]; shares its memory."""


class NHD(KVLayout):
    """Tokens first: a page is K [page, Hkv, D] followed by V [page, Hkv, Dv]."""

    @classmethod
    def bytes_per_page(cls, spec: BackendSpec) -> int:
        row = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
        return spec.page_size * row * torch_dtype(spec.kv_dtype).itemsize

    @classmethod
    def view(cls, storage: Tensor, spec: BackendSpec, k_scale: float, v_scale: float) -> KVView:
        shape = (spec.page_size, spec.num_kv_heads)
        k, v = _halves(storage, spec)
        k, v = k.view(-1, *shape, spec.head_dim), v.view(-1, *shape, spec.v_head_dim)
        return PagedView(k, v, k_scale, v_scale)


class HND(NHD):
    """Heads first: a page is K [Hkv, page, D] followed by V [Hkv, page, Dv]."""

    @classmethod
    def view(cls, storage: Tensor, spec: BackendSpec, k_scale: float, v_scale: float) -> KVView:
        shape = (spec.num_kv_heads, spec.page_size)
        k, v = _halves(storage, spec)
        k, v = k.view(-1, *shape, spec.head_dim), v.view(-1, *shape, spec.v_head_dim)
        return PagedView(k.transpose(1, 2), v.transpose(1, 2), k_scale, v_scale)


class Latent(KVLayout):
    """MLA's compressed cache: a page is [page, R + P], where head_dim = R + P."""

    @classmethod
    def bytes_per_page(cls, spec: BackendSpec) -> int:
        return spec.page_size * spec.head_dim * torch_dtype(spec.kv_dtype).itemsize

    @classmethod
    def view(cls, storage: Tensor, spec: BackendSpec, k_scale: float, v_scale: float) -> KVView:
        latent = storage.view(torch_dtype(spec.kv_dtype)).view(-1, spec.page_size, spec.head_dim)
        return LatentView(latent, k_scale)


BUILTIN_LAYOUTS: Mapping[str, type[KVLayout]] = MappingProxyType({"nhd": NHD, "hnd": HND, "latent": Latent})


def encode(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """x / scale in `dtype`; FP8 is reached from float32, rounds to nearest even, and saturates."""
    if dtype.itemsize > 1:
        x = x if scale == 1.0 else x / scale
        return x if x.dtype == dtype else x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def _halves(storage: Tensor, spec: BackendSpec) -> tuple[Tensor, Tensor]:
    """A page's K elements and V elements, [num_pages, …] each, as strided slices of the same bytes."""
    elements = storage.view(torch_dtype(spec.kv_dtype))
    split = spec.page_size * spec.num_kv_heads * spec.head_dim
    return elements[:, :split], elements[:, split:]
