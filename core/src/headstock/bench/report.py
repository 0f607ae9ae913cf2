"""A comparison's figures in words: rows of a table for people, a document for programs. Torch-free but for numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstock.bench.compare import Measured
    from headstock.bench.timing import Limits

COLUMNS = ("workload", "backend", "a layer", "spread", "GB/s", "GFLOP/s", "of limit", "plan")


def ordered(measured: Sequence[Measured]) -> list[Measured]:
    """What was timed, workload by workload, the fastest of each first."""
    place = {each: number for number, each in enumerate(dict.fromkeys((m.workload.name, m.group) for m in measured))}

    def order(each: Measured) -> tuple[int, float]:
        return place[each.workload.name, each.group], each.device.median if each.device else float("inf")

    return [each for each in sorted(measured, key=order) if each.device]


def row(each: Measured, limits: Limits) -> list[str]:
    """The figures of a layer that was timed, as COLUMNS has them; the plan is once per forward."""
    device, host = each.device, each.host
    assert device is not None, "only what was timed has a row"
    assert host is not None, "and planned"
    share, limit = each.share(limits)
    rates = (f"{amount / device.median / 1e9:.3g}" for amount in each.work)
    return [where(each), each.label, duration(device.median), f"{device.spread:.0%}", *rates, f"{share:.0%} {limit}",
            duration(host.median)]  # fmt: skip


def kernels(measured: Sequence[Measured]) -> list[str]:
    """What runs behind each backend's figures: a line for each kernel and KV configuration, with its workloads."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in measured:
        if each.device:
            found.setdefault((each.label, configured(each)), []).append(where(each))
    return [f"{label}: {told}: {', '.join(places)}" for (label, told), places in found.items()]


def configured(each: Measured) -> str:
    """The kernel, the KV configuration and how it was launched."""
    launched = "replayed from a graph" if each.graph else "launched eagerly"
    name = kernel(each.described) or "a kernel that it does not describe"
    return f"{name}; page {each.page_size} {each.kv_layout}, {launched}"


def failures(measured: Sequence[Measured]) -> list[str]:
    """Who was not timed, and why: a line each, workloads that failed alike together."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in measured:
        if each.failure:
            found.setdefault((each.label, each.failure), []).append(where(each))
    return [f"{backend}: {', '.join(where)}: {failure}" for (backend, failure), where in found.items()]


def summary(limits: Limits, dtype: str) -> str:
    """The measured limits in a line."""
    memory, matrix = quantity(limits.bytes_per_second, "B/s"), quantity(limits.flops_per_second, "FLOP/s")
    return f"measured limits: memory {memory}, {dtype} matrix products {matrix}"


def as_dict(measured: Sequence[Measured], limits: Limits, told: Mapping[str, Any]) -> dict[str, Any]:
    """The whole comparison as plain data; `told` is of the machine, model and dtype."""
    return {**told, "limits": limits._asdict(), "figures": [each.as_dict(limits) for each in measured]}


def duration(seconds: float) -> str:
    """Seconds in three digits, with the unit that suits: "12.3 µs"."""
    seconds = float(f"{seconds:.3g}")
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def quantity(value: float, unit: str) -> str:
    """A number with a decimal prefix: "4.2 TB/s"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def kernel(described: Mapping[str, str | int | bool] | None) -> str:
    """What a backend says of the kernel that runs: its name, then the rest as "key value"."""
    told = dict(described or {})
    name = str(told.pop("kernel", ""))
    rest = [f"{key.replace('_', ' ')} {'yes' if v is True else 'no' if v is False else v}" for key, v in told.items()]
    return ", ".join(filter(None, [name, *rest]))


def where(each: Measured) -> str:
    """The workload, and the layer group where there are several."""
    return each.workload.name if each.group == "all" else f"{each.workload.name} ({each.group})"
