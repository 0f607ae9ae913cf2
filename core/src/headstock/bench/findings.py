"""Findings: why attention is slow, each with its evidence in numbers and what to change. Judged from data alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from headstock.bench.recorded import Forward
from headstock.bench.report import duration
from headstock.bench.timing import Times
from headstock.requirement import Requirement

if TYPE_CHECKING:
    from headstock.runner.graph import Fallback

Kind = Literal[
    "wrong backend", "kernel mismatch", "not contiguous", "graphs not used", "outside the captured sizes",
    "planning dominates", "prefix sharing unused", "memory pressure",
]  # fmt: skip

WORTH = 1.1
"""The least ratio of times that is worth a finding."""
PLANNING = 0.2
"""The least part of a step that planning takes to be worth one."""
EAGER = 0.05
"""The least part of decode steps that run eagerly beside graphs to be worth one."""
SMALL_PAGE = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason for slowness: what it is, where, its evidence, and the cure.

    `gain` is how many times faster attention there would be without it, as far as that was measured, else 1.
    """

    kind: Kind
    where: str
    evidence: str
    cure: str
    gain: float = 1.0
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.evidence}; {self.cure}"


def faster(slow: Times, fast: Times) -> float | None:
    """How many times faster `fast` is, if that is worth a word and the middle halves of both are apart."""
    ratio = slow.median / fast.median
    return ratio if ratio >= WORTH and fast.quartiles[1] < slow.quartiles[0] else None


def wrong_backend(where: str, chosen: str, why: str, own: Times, rivals: Mapping[str, Times]) -> Iterator[Finding]:
    """The valid backend that was measured fastest, where it is not the one that serves; `why` that one does."""
    if not rivals:
        return
    best = min(rivals, key=lambda name: rivals[name].median)
    if gain := faster(own, rivals[best]):
        evidence = f"{chosen} takes {duration(own.median)} a layer, {best} {duration(rivals[best].median)}"
        asked = (
            f"drop the choice that it was {why}, or name {best}" if why.startswith("asked for") else "headstock tune"
        )
        numbers = {"seconds": own.median, "best_seconds": rivals[best].median}
        yield Finding("wrong backend", where, f"{evidence}, {gain:.2f} times less", asked, gain, numbers)


def kernel_mismatch(
    where: str, backend: str, need: Requirement, described: Mapping[str, str | int | bool]
) -> Iterator[Finding]:
    """What a backend's own words tell of a kernel that does not fit the model."""

    def found(evidence: str, cure: str, **numbers: float) -> Finding:
        return Finding("kernel mismatch", where, f"{backend}: {evidence}", cure, numbers=numbers)

    padded = described.get("head_dim", need.head_dim)
    if isinstance(padded, int) and padded > need.head_dim:
        waste = 1 - need.head_dim / padded
        evidence = f"heads of {need.head_dim} are computed as {padded}, {waste:.0%} of the products are padding"
        yield found(evidence, "a backend with a kernel for this head size", head_dim=need.head_dim, padded=padded)
    if described.get("tensor_cores") is False and need.gqa_ratio > 1:
        evidence = f"{need.gqa_ratio} query heads share a key head, and their products run off the tensor cores"
        yield found(evidence, "a kernel that takes the group as rows of a matrix", gqa_ratio=need.gqa_ratio)
    if (upcast := described.get("upcast")) and need.kv_dtype != need.dtype:
        evidence = f"the cache holds {need.kv_dtype}, which is converted to {upcast} key by key"
        yield found(evidence, "a backend that computes in it, or --kv-dtype auto where memory allows")
    elif upcast and need.dtype != upcast:
        evidence = f"keys and values in {need.dtype} are converted to {upcast} first"
        yield found(evidence, f"a backend that computes in {need.dtype}")
    if better := described.get("faster"):
        evidence = f"{described.get('kernel', 'its kernel')} runs where it has {better} for this device"
        yield found(evidence, "what that kernel does not cover, as the backend's documentation tells")


def not_contiguous(where: str, own: Times, variants: Mapping[str, Times], page_size: int | None) -> Iterator[Finding]:
    """What laying the data out otherwise would save; `variants` have the times of "packed", "ordered" and "paged"."""
    said = {
        "packed": (
            "q, k and v are slices of one projection",
            "contiguous copies of them",
            "a backend that reads strides",
        ),
        "ordered": ("a row's pages are scattered", "consecutive ones", "larger pages: --page-size 64"),
        "paged": (f"pages hold {page_size} tokens", f"pages of {SMALL_PAGE}", f"--page-size {SMALL_PAGE}, or more"),
    }
    for name, times in variants.items():
        if gain := faster(own, times):
            is_so, instead, cure = said[name]
            evidence = f"{is_so}, {duration(own.median)} a layer; with {instead} {duration(times.median)}"
            numbers = {"seconds": own.median, "otherwise": times.median}
            yield Finding("not contiguous", where, evidence, cure, gain, numbers)


def planning_dominates(where: str, plan: float, layer: float, layers: int, per_plan: str) -> Iterator[Finding]:
    """Where the host plans for long, beside what its layers take."""
    part = plan / (plan + layers * layer)
    if part >= PLANNING:
        evidence = (
            f"planning takes {duration(plan)} a step, {part:.0%} of it; {layers} layers {duration(layers * layer)}"
        )
        numbers = {"plan_seconds": plan, "layer_seconds": layer, "part": part}
        yield Finding("planning dominates", where, evidence, per_plan, 1 / (1 - part), numbers)


def sharing_unused(where: str, rows: int, shared: int, own: int, why: str, cure: str) -> Iterator[Finding]:
    """Where `rows` rows have `shared` keys in common and read them once each; `own` are a row's other keys."""
    saved = rows * (shared + own) / (shared + rows * own)
    if rows > 1 and saved >= WORTH:
        evidence = f"{rows} rows share {shared} keys and read them {rows} times, {saved:.1f} times the bytes: {why}"
        numbers = {"rows": rows, "shared": shared, "times_the_bytes": saved}
        yield Finding("prefix sharing unused", where, evidence, cure, numbers=numbers)


def graphs_not_used(fallbacks: Mapping[Fallback, int], replays: int, sizes: Sequence[int]) -> Iterator[Finding]:
    """Decode steps that ran eagerly beside graphs, by their reason; `sizes` are the captured ones."""
    total = replays + sum(fallbacks.values())
    for reason, count in sorted(fallbacks.items(), key=lambda item: -item[1]):
        if count < EAGER * total:
            continue
        numbers = {"eager": float(count), "steps": float(total)}
        evidence = f"{count} of {total} decode steps ran eagerly: {reason}"
        if reason.kind == "size":
            cure = f"captured are up to {max(sizes, default=0)} rows: --max-batch and --graph-sizes"
            yield Finding("outside the captured sizes", "decode", evidence, cure, numbers=numbers)
        else:
            yield Finding("graphs not used", "decode", evidence, "a backend that can be replayed then", numbers=numbers)


def never_captured(where: str, backend: str, own: Times, captured: Times | None) -> Iterator[Finding]:
    """A decode step that is launched eagerly on a device with graphs, beside the same in one if the backend can."""
    if captured is None:
        evidence, cure = f"{backend} does not declare graphs", "a backend that does, where launches take the time"
        yield Finding("graphs not used", where, evidence, cure, numbers={"seconds": own.median})
    elif gain := faster(own, captured):
        evidence = (
            f"{backend} takes {duration(own.median)} a layer launched eagerly, {duration(captured.median)} in a graph"
        )
        numbers = {"seconds": own.median, "captured": captured.median}
        yield Finding("graphs not used", where, evidence, "--graph auto", gain, numbers)


def traced_graphs(forwards: Iterable[Forward]) -> Iterator[Finding]:
    """The same as a trace shows it: decode steps with and without a graph, and their milliseconds."""
    decoding = [forward for forward in forwards if forward.phase == "decode"]
    replayed = [len(each.query_lens) for each in decoding if each.graph]
    eager = [len(each.query_lens) for each in decoding if not each.graph]
    if len(eager) <= EAGER * len(decoding):
        return
    numbers = {"eager": float(len(eager)), "steps": float(len(decoding))}
    evidence = f"{len(eager)} of {len(decoding)} decode steps ran eagerly"
    if replayed and (beyond := [rows for rows in eager if rows > max(replayed)]):
        evidence += (
            f", {len(beyond)} of them with {min(beyond)} to {max(beyond)} rows; replayed were up to {max(replayed)}"
        )
        cure = "--max-batch and --graph-sizes that hold them"
        yield Finding("outside the captured sizes", "decode", evidence, cure, numbers=numbers)
    else:
        cure = "--graph on tells why, where the device has graphs"
        yield Finding("graphs not used", "decode", evidence, cure, numbers=numbers)


def memory_pressure(
    preemptions: int, steps: int, free_pages: int, pages: int, workspaces: int, kv_bytes: int
) -> Iterator[Finding]:
    """Requests that had to give way, and workspaces larger than the cache that they leave room for."""
    if preemptions:
        evidence = (
            f"{preemptions} requests gave way in {steps} steps, and ran again; {free_pages} of {pages} pages are free"
        )
        numbers = {"preemptions": float(preemptions), "steps": float(steps), "pages": float(pages)}
        cure = "--kv-tokens with more, a smaller --max-batch, or an FP8 --kv-dtype"
        yield Finding("memory pressure", "KV cache", evidence, cure, numbers=numbers)
    if workspaces > kv_bytes:
        evidence = f"workspaces take {workspaces / 1e6:.4g} MB, the KV cache is left {kv_bytes / 1e6:.4g} MB"
        numbers = {"workspaces": float(workspaces), "kv_bytes": float(kv_bytes)}
        yield Finding(
            "memory pressure", "workspaces", evidence, "a smaller --max-batch, or another backend", 1.0, numbers
        )
