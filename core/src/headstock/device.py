"""Everything that knows a device: what it is, how much memory is free, when its work is done."""

from __future__ import annotations

import mmap
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import dtype as Dtype

from headstock.errors import HeadstockError
from headstock.vocabulary import DEVICES, check_known


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name` ("bfloat16", "float8_e4m3fn")."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        works = "float32, float16, bfloat16, float8_e4m3fn, float8_e5m2"
        raise HeadstockError("unknown dtype", given=name, works=works)
    return dtype


def zeroed(num_bytes: int, device: torch.device | str) -> torch.Tensor:
    """Zeroed memory, uint8 [num_bytes]. On a CPU it takes up memory only once written, page by page."""
    if torch.device(device).type != "cpu" or num_bytes == 0:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # not shared, which is the default and counts against /dev/shm
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


class DeviceGraph(Protocol):
    """Recorded device work that can be run again on the same memory."""

    def replay(self) -> None: ...


class GraphPool(NamedTuple):
    """Memory that graphs share, and the stream they are recorded on, whose libraries then need one workspace."""

    handle: Any = None
    stream: Any = None


class Event(Protocol):
    """A point in a device's work that the host can wait for."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Done:
    """The event of a device that has done its work when a call returns."""

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device and what negotiation and planning need to know of it.

    `compute_capability` is major × 10 + minor, None where there is none; `num_sms` is 0 where there are none.
    """

    torch: torch.device
    name: str
    compute_capability: int | None = None
    num_sms: int = 0

    @classmethod
    def open(cls, name: str = "auto") -> Device:
        """The device called `name` as torch spells it, or for "auto" the first GPU, else the CPU."""
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        check_known("device", str(name).partition(":")[0], DEVICES)
        try:
            device = torch.device(name)
        except RuntimeError:
            raise HeadstockError("unknown device", given=name, works="cpu, cuda, cuda:1") from None
        if device.type == "cpu":
            if device.index:
                raise HeadstockError("there is one CPU", given=name, works="cpu")
            return cls(device, "CPU")
        if device.type == "cuda":
            if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
                raise HeadstockError("no such GPU here", given=name, works="cpu", type="--device cpu")
            found = torch.cuda.get_device_properties(device)
            return cls(device, found.name, found.major * 10 + found.minor, found.multi_processor_count)
        return cls(device, name)

    def active(self) -> AbstractContextManager[Any]:
        """Inside, kernels that are launched by other means than torch's go to this GPU, be it not the first one."""
        if self.torch.type != "cuda" or self.torch.index is None:  # "cuda" is whichever GPU is the current one
            return nullcontext()
        return torch.cuda.device(self.torch)

    def free_memory(self, root: str | Path = "/") -> int:
        """Bytes that can still be had: what the driver reports, or the least that the system and control groups leave.

        `root` is where proc and sys are mounted.
        """
        if self.torch.type == "cuda":
            return torch.cuda.mem_get_info(self.torch)[0]
        try:
            with open(Path(root, "proc/meminfo"), encoding="ascii") as lines:
                available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, StopIteration):
            available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min([available, *_left_by_control_groups(Path(root))])

    def pinned(self, shape: tuple[int, ...], dtype: Dtype) -> Tensor:
        """Zeroed host memory that this device reads while the host goes on, where it has such."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.torch.type == "cuda")

    def event(self) -> Event:
        """A point in this device's work, still to be recorded; until then there is nothing to wait for.

        Recorded in a capture, it is passed at every replay.
        """
        return torch.cuda.Event(external=True) if self.torch.type == "cuda" else _Done()  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Waits until the device has done all work issued so far."""
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)

    def seconds(self, run: Callable[[], None]) -> float:
        """How long this device works on what `run` issues: between two marks on its stream, or on the host's clock."""
        if self.torch.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3
        self.synchronize()
        started = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - started

    def allocations(self) -> int:
        """How many times memory of this device was handed out so far; 0 where the device does not tell."""
        if self.torch.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self.torch)["allocation.all.allocated"])

    def graph_pool(self) -> GraphPool:
        """What the graphs of one model share."""
        if self.torch.type != "cuda":
            return GraphPool()
        return GraphPool(torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.torch))  # type: ignore[no-untyped-call]

    @contextmanager
    def warming_up(self, pool: GraphPool | None = None) -> Iterator[None]:
        """Runs what is inside as a capture into `pool` needs it to have run before: on its stream, and to its end."""
        if self.torch.type != "cuda":
            yield
            return
        stream = (pool or self.graph_pool()).stream
        current = torch.cuda.current_stream(self.torch)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)
        self.synchronize()

    @contextmanager
    def no_sync(self, strict: bool = True) -> Iterator[None]:
        """Raises inside where the host waits for the device, as far as the device can tell, unless not `strict`."""
        if self.torch.type != "cuda" or not strict:
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says of its own switch that it does not see every wait
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def capture(self, run: Callable[[], None], pool: GraphPool | None = None) -> DeviceGraph:
        """Records what `run` does on this device's current stream.

        Raises HostSync where recorded code waits for the device, as far as the device can tell.
        """
        if self.torch.type == "cuda":
            graph, pool = torch.cuda.CUDAGraph(), pool or self.graph_pool()
            with torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream):
                run()
            return graph
        from headstock.runner.recording import record

        return record(run)

    def default_dtype(self, preferred: str) -> str:
        """`preferred` where the device is fast in it, else float32: a CPU without bfloat16 units takes float32."""
        if self.torch.type == "cpu" and preferred != "float32":
            return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() and _native_bf16() else "float32"
        return preferred


def _native_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 itself instead of emulating it."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _left_by_control_groups(root: Path) -> list[int]:
    """The bytes that each control group of this process, and each one above it, leaves below its limit.

    Pages of files that nobody used lately count as usage and are given up on demand: they are added back.
    """
    left = []
    for mount, group, names in _control_groups(root):
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # no such file at the top of the tree; "max" is no limit
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                left.append(max(limit - used + _statistic(folder / "memory.stat", names[2]), 0))
            if folder == mount:
                break
    return left


def _control_groups(root: Path) -> Iterator[tuple[Path, Path, tuple[str, str, str]]]:
    """Where the hierarchies that count memory are mounted, this process's group in each, and the names of the files."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                mount = root / "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            yield mount, mount / path.strip("/"), names


def _statistic(file: Path, name: str) -> int:
    """A number of a file of lines "name number"; 0 where it is not told."""
    with suppress(OSError):
        return next((int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(f"{name} ")), 0)
    return 0
