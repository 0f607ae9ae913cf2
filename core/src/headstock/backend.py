"""The contract a backend implements: two methods to write, the rest to override for more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from headstock.batch import ForwardBatch
    from headstock.layer import AttentionLayer

Phase = Literal["extend", "decode"]
AttentionKind = Literal["paged", "ragged", "mla"]
HostLengths = Literal["none", "bound", "exact"]


class GraphFallback(Exception):
    """A planning hook's word that this step cannot be replayed: the host runs it eagerly and counts `reason`."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class GraphBucket(NamedTuple):
    """A captured size: rows, uniform query length, and shared-prefix levels."""

    batch: int
    query_len: int = 1
    levels: int = 0


class WorkspaceBytes(NamedTuple):
    """Device memory an instance asks for, in bytes: `scratch` is shared per stream, `state` is its own."""

    scratch: int = 0
    state: int = 0


class Workspace(NamedTuple):
    """Device memory an instance is given, as uint8 tensors, 256-byte aligned.

    `scratch` holds garbage at each forward, since every instance on the stream writes to it; `state` belongs to
    this instance alone and starts zeroed.
    """

    scratch: Tensor
    state: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """Everything fixed that an instance may know: device, shapes, features, limits. Free of torch.

    One instance serves one layer group, the set of layers that agree on all of it, for one offer and attention kind.
    Head counts are those of this rank. Dtypes are torch's names ("bfloat16"). `window` counts the keys a position
    sees, itself included. `scale` multiplies q·k before `softcap`.
    """

    device: str
    compute_capability: int | None = None  # major × 10 + minor; None where the device has none
    num_sms: int = 0
    attention: AttentionKind = "paged"
    phases: frozenset[str] = frozenset({"extend", "decode"})
    dtype: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    non_causal: bool = False
    query_mask: bool = False
    lse: bool = False
    page_size: int = 0  # 0 when nothing is cached (ragged)
    kv_layout: str = ""
    max_batch: int
    max_tokens: int
    max_context: int
    max_plans: int = 1
    max_levels: int = 0
    query_lens: frozenset[int] = frozenset({1})
    graph_buckets: tuple[GraphBucket, ...] = ()
    batch_invariant: bool = False
    host_lengths: HostLengths = "exact"
    group: str = "all"
    options: object = None


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a long preparation: what is being done, and how far it is."""

    what: str
    done: int = 0
    total: int = 0


Report = Callable[[Progress], None]


class AttentionBackend(ABC):
    """An attention kernel as the host drives it: planned once per forward, run once per layer.

    An instance keeps nothing of a batch on itself: a plan lives in `batch.metadata`, so that one instance serves
    eager steps, every captured bucket, and several plans alive at once. All device work goes to the current stream.
    """

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        self.spec = spec
        self.workspace = workspace

    @classmethod
    def workspace_bytes(cls, spec: BackendSpec) -> WorkspaceBytes:
        """Device memory needed for `spec`, in bytes, computed from shapes; nothing by default."""
        return WorkspaceBytes()

    @classmethod
    def prepare(cls, spec: BackendSpec, report: Report) -> None:
        """Compiles ahead what `spec` will run, without a device and before weights load; nothing by default."""
        return

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plans one forward on the host: page indices, split counts, masks. Sets `batch.metadata`."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, *,
        out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Runs one layer: caches the new keys and values, attends, writes `out`.

        q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], last stride 1 and the others free; `k is None` means that they are
        cached already, `layer.kv is None` (ragged) that there is nothing to cache. Writes out [T, Hq, Dv] and, where
        given, lse [T, Hq] float32, natural log. A row that sees no key gets 0 and −inf. No host sync.
        """

    def init_cuda_graph_state(self, batches: Sequence[ForwardBatch]) -> None:
        """Shown once the host's static batches, one per capture bucket, before any capture; nothing by default."""
        return

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        """Plans for a capture; by default as for any forward, into the same buffers."""
        self.init_forward_metadata(batch)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        """Plans for a replay, in place and without allocating device memory; by default as for any forward."""
        self.init_forward_metadata(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Device-only planning, recorded into the graph, or run after the hooks above when eager; by default none."""
        return

    def describe(self, batch: ForwardBatch) -> Mapping[str, str | int | bool]:
        """Which kernel a planned batch will run; for reports, and eager only. Nothing by default.

        Any names and values may be told. Reports understand these: `kernel`, its name; `head_dim`, as it computes it,
        padding included; `tensor_cores`, whether its products run on them; `upcast`, the dtype to which cached keys and
        values are converted first; `splits`, how finely keys are cut to fill the device; `levels`, of the shared
        prefixes that are read once; `faster`, a kernel that this backend has for the device and cannot use here.
        """
        return {}
