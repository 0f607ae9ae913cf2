"""FlashInfer's wrappers, made for one spec, each over an int workspace of its own; and the room of eager plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor

from headstock import AttentionLayer, BackendSpec, ForwardBatch, HeadstockError, LatentView
from headstock_flashinfer_mla.accessor import Library
from headstock_flashinfer_mla.plan import Rows, flat


class Wrapper(ABC):
    """A wrapper of one kernel. `info` is what its last plan fixed, as far as it is known."""

    info: tuple[int, ...] = ()

    def __init__(self, spec: BackendSpec, kernel: str):
        self.spec, self.kernel, self.dtype = spec, kernel, getattr(torch, spec.dtype)
        cuda = torch.device(spec.device).type == "cuda"
        self._read = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    @contextmanager
    def staged(self) -> Iterator[None]:
        """About a plan: its pinned memory is filled once the device has read what the last plan left there."""
        if self._read is not None:
            self._read.synchronize()
        yield
        if self._read is not None:
            self._read.record()

    @abstractmethod
    def plan(self, batch: ForwardBatch, rows: Rows, causal: bool) -> None:
        """Plans a batch on the host."""

    @abstractmethod
    def run(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, out: Tensor, lse: Tensor | None
    ) -> None:
        """Attends as planned; `out` and `lse` are contiguous, and lse in base 2."""


class Absorbed(Wrapper):
    """The wrapper of latent attention: queries [T, Hq, R+P] over latents in pages."""

    def __init__(self, spec: BackendSpec, kernel: str, library: Library, scratch: Tensor, ints: Tensor):
        super().__init__(spec, kernel)
        self.library = library
        self.inner = library.absorbed_wrapper(scratch, backend=kernel)
        one, page = torch.arange(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32, device=scratch.device)
        library.plan(  # loads the kernel, for one query and one key
            self.inner, one, one, page, one[1:], lse=spec.lse, num_heads=spec.num_heads, head_dim_ckv=spec.v_head_dim,
            head_dim_kpe=spec.head_dim - spec.v_head_dim, page_size=spec.page_size, causal=False, sm_scale=spec.scale,
            q_data_type=self.dtype, kv_data_type=self.dtype,
        )  # fmt: skip
        pinned = torch.empty(len(ints), dtype=torch.uint8, pin_memory=scratch.is_cuda)
        self.inside = library.inside(self.inner, ints, pinned)

    def plan(self, batch: ForwardBatch, rows: Rows, causal: bool) -> None:
        assert batch.page_table is not None, "latents lie in pages"
        with self.staged():
            self.info = self.library.plan_inside(
                self.inside, rows.queries, rows.starts, flat(batch.page_table), rows.lens, self.spec.num_heads,
                self.spec.v_head_dim, causal,
            )  # fmt: skip

    def run(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, out: Tensor, lse: Tensor | None
    ) -> None:
        assert isinstance(layer.kv, LatentView), "what the latent layout is seen through"
        rank, latent = self.spec.v_head_dim, layer.kv.latent
        if q.data_ptr() % 16 or any(stride % 8 for stride in q.stride()[:-1]):  # kernels load 16 bytes at a time
            q = q.contiguous()
        keys = (latent[..., :rank], latent[..., rank:])
        self.library.run(self.inner, (q[..., :rank], q[..., rank:]), keys, out, lse)


class Expanded(Wrapper):
    """The ragged prefill wrapper: queries and keys [T, Hq, 192] and values [T, Hq, 128], in no cache."""

    def __init__(self, spec: BackendSpec, library: Library, scratch: Tensor, ints: Tensor):
        super().__init__(spec, "fa3")
        self.inner = library.expanded_wrapper(scratch, "NHD", backend=self.kernel)
        self.inner.reset_workspace_buffer(scratch, ints)

    def plan(self, batch: ForwardBatch, rows: Rows, causal: bool) -> None:
        spec = self.spec
        with self.staged():
            self.inner.plan(
                rows.queries, rows.starts, spec.num_heads, spec.num_kv_heads, spec.head_dim,
                head_dim_vo=spec.v_head_dim, causal=causal, sm_scale=spec.scale, q_data_type=self.dtype,
                kv_data_type=self.dtype,
            )  # fmt: skip

    def run(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, out: Tensor, lse: Tensor | None
    ) -> None:
        if k is None or len(k):  # fa3 cannot describe no keys to the device, and says so on the console; all are blind
            self.inner.run(q, k, v, out=out, lse=lse, return_lse=lse is not None)


class Plan:
    """What runs a batch; `blind` int64 [N] has the tokens that see no key, on the device, None where all see some."""

    def __init__(self, room: Room, kernel: str, blind: Tensor | None = None):
        self._room, self._wrapper, self.blind = room, room.wrapper(kernel), blind
        room.owner = ref(self)

    @property
    def wrapper(self) -> Wrapper:
        """The planned wrapper. HeadstockError where more plans were made since than may be alive at once."""
        if self._room.owner is None or self._room.owner() is not self:
            works = "BackendSpec(max_plans=…) as many as are alive"
            raise HeadstockError("this batch's plan was given up for a later one", works=works)
        return self._wrapper


class Room:
    """An int workspace, wrappers over it by kernel, made when they are first needed, and the plan that holds it."""

    def __init__(self, make: Callable[[Tensor, str], Wrapper], ints: Tensor):
        self._make, self._ints = make, ints
        self._wrappers: dict[str, Wrapper] = {}
        self.owner: ref[Plan] | None = None

    def wrapper(self, kernel: str) -> Wrapper:
        """The wrapper of a kernel."""
        if kernel not in self._wrappers:
            self._wrappers[kernel] = self._make(self._ints, kernel)
        return self._wrappers[kernel]


def take(rooms: list[Room]) -> Room:
    """A room whose plan is forgotten, or else the one taken longest ago; it goes to the end of the list."""
    chosen = min(rooms, key=lambda room: room.owner is not None and room.owner() is not None)
    rooms.remove(chosen)
    rooms.append(chosen)
    return chosen
