"""The laws that a backend keeps: each takes a backend class and a problem's fields, and raises AssertionError."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from headstock.backend import AttentionBackend
from headstock.batch import ForwardBatch
from headstock.kv.layout import NHD, Latent
from headstock.testing.graphs import replays_equal_eager
from headstock.testing.layouts import DISTANT, PACKED
from headstock.testing.mla import absorbed_against_expanded, compare_merged, given_parts_merge
from headstock.testing.problem import Problem, Result, close, make_problem, tensors
from headstock.testing.rig import Rig

Backend = type[AttentionBackend]
Fields = Mapping[str, Any]
Law = Callable[[Backend, Fields], None]


def matches_reference(backend: Backend, fields: Fields) -> None:
    """Output, log-sum-exp and cache are those of the float64 reference."""
    problem(fields).check(backend)


def rows_alone(backend: Backend, fields: Fields) -> None:
    """A row alone gives what it gives in a batch: bit for bit where batch invariance is promised."""
    whole = problem(fields)
    together = Rig(backend, whole.spec).run(whole)
    starts = whole.batch.query_indptr.tolist()
    for row in range(whole.batch.num_real_reqs):
        part = slice(starts[row], starts[row + 1])
        single = one_row(whole, row)
        alone = Rig(backend, single.spec).run(single)
        if whole.spec.batch_invariant:
            assert torch.equal(alone.out, together.out[part]), f"row {row} alone has other bits than in its batch"
        close(alone.out, whole.expected[0][part], whole.tolerance()[0], what=f"row {row} alone, out [token, head, dim]")


def chunks_equal_one_shot(backend: Backend, fields: Fields) -> None:
    """A prompt in chunks, each cached before the next, gives what it gives in one pass."""
    whole = problem(fields)
    rig, (_, storage) = Rig(backend, whole.spec), whole.fresh()
    total = whole.batch.num_tokens
    cuts = sorted({0, 1, whole.spec.page_size, total // 2, total - 1, total} & set(range(total + 1)))
    outs = []
    for first, stop in pairwise(cuts):
        part = span(whole, first, stop, "extend")
        rig.plan(part.batch)
        outs.append(rig.forward(part, part.batch, storage).out)
    whole.compare(Result(torch.cat(outs), None, storage))


def decode_continues_extend(backend: Backend, fields: Fields) -> None:
    """What extend cached, decode reads: a prompt and then token by token, as in one pass."""
    other_reads_what_was_written(backend, backend, {**fields, "reader": "decode"})


def other_reads_what_was_written(writer: Backend, reader: Backend, fields: Fields) -> None:
    """One backend caches half a prompt, another goes on from there in the phase `reader`, token by token."""
    fields = dict(fields)
    phase = fields.pop("reader")
    whole = problem(fields)
    total, first, (_, storage) = whole.batch.num_tokens, whole.batch.num_tokens // 2, whole.fresh()
    spec = replace(whole.spec, phases=frozenset({"extend"}))
    rigs = [Rig(writer, spec), Rig(reader, replace(spec, phases=frozenset({phase})))]
    if writer is reader:
        rigs = [Rig(writer, replace(spec, phases=frozenset({"extend", phase})))] * 2
    outs = []
    for start, stop in [(0, first), *((i, i + 1) for i in range(first, total))]:
        part = span(whole, start, stop, phase if start else "extend")
        rig = rigs[bool(start)]
        rig.plan(part.batch)
        outs.append(rig.forward(part, part.batch, storage).out)
    whole.compare(Result(torch.cat(outs), None, storage))


def zero_queries_average(backend: Backend, fields: Fields) -> None:
    """Queries of zero see all keys alike: the output is the plain mean of the values seen, without any reference."""
    given = problem({**fields, "zero_queries": True})
    rig, (batch, storage) = Rig(backend, given.spec), given.fresh()
    rig.plan(batch)
    out = rig.forward(given, batch, storage).out
    cache = given.layer(storage).kv
    assert cache is not None and batch.page_table is not None, "a paged problem"  # noqa: PT018
    starts, lens = batch.query_indptr.tolist(), batch.seq_lens.tolist()
    for row, length in enumerate(lens[: batch.num_real_reqs]):
        keys = torch.arange(length, device=out.device)
        pages = batch.page_table[row, keys // batch.page_size].long()
        latents, values = cache.gather(pages * batch.page_size + keys % batch.page_size)
        scale = given.k_scale if values is None else given.v_scale
        values = latents[..., : given.spec.v_head_dim] if values is None else values
        values = values.double().repeat_interleave(given.spec.num_heads // given.spec.num_kv_heads, 1) * scale
        new = starts[row + 1] - starts[row]
        for i in range(new):
            mean = values[: length - new + i + 1 if batch.causal else length].mean(0)
            close(out[starts[row] + i], mean, given.tolerance()[0], what=f"row {row}, query {i}: the mean of V")


def cached_keys_are_not_written(backend: Backend, fields: Fields) -> None:
    """Without k and v the new tokens are cached already: the same output, and not a byte of the cache changes."""
    given = problem(fields)
    stored = given.expected[2]
    assert stored is not None, "a paged problem"
    cached = replace(given, k=None, v=None, storage=stored)
    cached.compare(Rig(backend, given.spec).run(cached))


def instances_hold_no_batch(backend: Backend, fields: Fields) -> None:
    """One instance serves larger and smaller batches by turns, and goes on after a forward that raised."""
    large = problem(fields)
    small = one_row(large, large.batch.num_real_reqs - 1)
    moved = problem({**fields, "seed": 1})  # the same lengths on other pages
    rig = Rig(backend, large.spec)
    for given in (small, large, moved, small, *[large] * 24):
        given.compare(rig.run(given))
    rig.raises(large)
    for given in (small, large):
        given.compare(rig.run(given))


def plans_live_side_by_side(backend: Backend, fields: Fields) -> None:
    """Two batches planned before either runs, and each plan serves layers that differ in cache, scales and sinks."""
    first = problem({**fields, "max_plans": 2})
    second = one_row(first, 0)
    moved = problem({**fields, "max_plans": 2, "seed": 1})  # the same lengths on other pages, for another instance
    rig, neighbour = Rig(backend, first.spec), Rig(backend, first.spec)
    planned = [(rig, first, *first.fresh()), (neighbour, moved, *moved.fresh()), (rig, second, *second.fresh())]
    for stand, _, batch, _ in planned:
        stand.plan(batch)
    for stand, given, batch, storage in planned:
        given.compare(stand.forward(given, batch, storage))
    scales = {"k_scale": first.k_scale * 2, "v_scale": first.v_scale * 4} if first.k_scale != 1.0 else {}
    other = problem({**fields, "max_plans": 2, "content": 1, "layer_index": 1, **scales})
    other.compare(rig.forward(other, planned[0][2], other.fresh()[1]))


def strides_are_honoured(backend: Backend, fields: Fields) -> None:
    """A cache whose rows hold more than a key, and queries laid out by heads, give the same."""
    given = problem({**fields, "layout": PACKED[fields["attention"]], "heads_first": True})
    given.compare(Rig(backend, given.spec).run(given))
    mixed = problem(fields)  # as a model gives them that rotates keys into a tensor of their own
    assert mixed.k is not None, "a problem with new tokens"
    for k, v in ((mixed.k.contiguous(), mixed.v), (mixed.k, None if mixed.v is None else mixed.v.contiguous())):
        each = replace(mixed, k=k, v=v)
        each.compare(Rig(backend, each.spec).run(each))


def offsets_are_64_bit(backend: Backend, fields: Fields) -> None:
    """Keys that lie past 2³¹ elements of their cache are found: pages are far apart, and little of it is memory."""
    given = problem(
        {**fields, "layout": DISTANT[fields["attention"]], "order": "ordered", "poison": "huge", "spare": 0}, keep=False
    )
    batch = replace(given.batch)
    rig = Rig(backend, given.spec)
    rig.plan(batch)
    out = rig.forward(given, batch, given.storage).out
    close(out, _near(given).expected[0], given.tolerance()[0], what="out [token, head, dim]")


def parts_merge(backend: Backend, fields: Fields) -> None:
    """Keys in two parts, each with its log-sum-exp, merge to the whole; a part without keys weighs nothing."""
    whole = problem(fields)
    batch, stored = whole.batch, whole.expected[2]
    if batch.page_table is None:
        given_parts_merge(backend, whole)
        return
    lens, page = batch.seq_lens.tolist(), batch.page_size
    cached = replace(whole, k=None, v=None, storage=stored)
    cut = [length // page * page if row % 2 else 0 for row, length in enumerate(lens)]
    rest = torch.zeros_like(batch.page_table)
    for row, first in enumerate(cut):
        rest[row, : rest.shape[1] - first // page] = batch.page_table[row, first // page :]
    states = []
    rig = Rig(backend, whole.spec)
    for table, keys in ((batch.page_table, cut), (rest, [n - first for n, first in zip(lens, cut, strict=True)])):
        part = ForwardBatch.from_lengths(
            [1] * len(lens), keys, table, page, phase="decode", write=False, max_seq_len=batch.max_seq_len,
            host_lengths="exact" if batch.seq_lens_cpu is not None else "bound",
        )  # fmt: skip
        rig.plan(part)
        states.append(rig.forward(replace(cached, batch=part), part, stored))
    compare_merged(whole, *states)


def absorbed_equals_expanded(backend: Backend, fields: Fields) -> None:
    """Attention in the latent space, projected up, is attention over keys and values that were projected up before."""
    absorbed_against_expanded(backend, problem(fields))


def describes_itself(backend: Backend, fields: Fields) -> None:
    """`describe` gives plain values for a planned batch."""
    given = problem(fields)
    rig, (batch, _) = Rig(backend, given.spec), given.fresh()
    rig.plan(batch)
    for key, value in rig.instance.describe(batch).items():
        assert isinstance(key, str), f"describe has a key that is no text: {key!r}"
        assert isinstance(value, str | int | bool), f"describe says {key} is {value!r}: text, int or bool it may be"


LAWS: Mapping[str, Law] = MappingProxyType(
    {
        "matches": matches_reference,
        "mean": zero_queries_average,
        "alone": rows_alone,
        "chunks": chunks_equal_one_shot,
        "continues": decode_continues_extend,
        "cached": cached_keys_are_not_written,
        "reuse": instances_hold_no_batch,
        "plans": plans_live_side_by_side,
        "merges": parts_merge,
        "absorbs": absorbed_equals_expanded,
        "strides": strides_are_honoured,
        "offsets": offsets_are_64_bit,
        "graph": replays_equal_eager,
        "describe": describes_itself,
    }
)
"""Every law by the name that cases bear."""


def problem(fields: Fields, *, keep: bool = True) -> Problem:
    """The problem of some fields: made, and solved by the reference, once for all who ask."""
    frozen = tuple(sorted((name, _frozen(value)) for name, value in fields.items()))
    return _kept(frozen) if keep else make_problem(**dict(frozen))


@lru_cache(maxsize=4096)
def _kept(fields: tuple[tuple[str, Any], ...]) -> Problem:
    return make_problem(**dict(fields))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list | tuple) else value


def one_row(whole: Problem, row: int) -> Problem:
    """Row `row` of a problem as a problem of its own, on the same cache."""
    batch, lens = whole.batch, whole.batch.seq_lens.tolist()
    starts = batch.query_indptr.tolist()
    part, new = slice(starts[row], starts[row + 1]), starts[row + 1] - starts[row]
    keys = slice(sum(lens[:row]), sum(lens[: row + 1])) if batch.page_table is None else part
    mask = None
    if batch.query_mask is not None and batch.mask_indptr is not None:
        mask = batch.query_mask[int(batch.mask_indptr[row]) : int(batch.mask_indptr[row + 1])]
    single = ForwardBatch.from_lengths(
        [new],
        [lens[row]],
        None if batch.page_table is None else batch.page_table[row : row + 1],
        batch.page_size,
        phase=batch.phase,
        causal=batch.causal,
        write=batch.out_cache_loc is not None,
        positions=batch.positions[part],
        device=batch.positions.device,
        host_lengths="exact" if batch.seq_lens_cpu is not None else "bound",
        max_seq_len=batch.max_seq_len,
        query_mask=mask,
    )
    spec = whole.spec
    return replace(
        whole,
        spec=spec,
        batch=single,
        q=whole.q[part],
        k=None if whole.k is None else whole.k[keys],
        v=None if whole.v is None else whole.v[keys],
    )


def span(whole: Problem, first: int, stop: int, phase: Any) -> Problem:
    """Tokens first…stop of a problem with one row, as the step that follows those before."""
    batch, part = whole.batch, slice(first, stop)
    prefix = int(batch.seq_lens[0]) - batch.num_tokens
    single = ForwardBatch.from_lengths(
        [stop - first],
        [prefix + stop],
        batch.page_table,
        batch.page_size,
        phase=phase,
        positions=batch.positions[part],
        host_lengths="exact" if batch.seq_lens_cpu is not None else "bound",
        max_seq_len=batch.max_seq_len,
    )
    assert whole.k is not None, "a problem with new tokens"
    v = None if whole.v is None else whole.v[part]
    return replace(whole, batch=single, q=whole.q[part], k=whole.k[part], v=v)


def _near(given: Problem) -> Problem:
    """A far problem's like in an ordinary cache."""
    spec, storage = given.spec, given.storage
    assert storage is not None, "a far problem is paged"
    layout = NHD if spec.attention == "paged" else Latent
    near = torch.zeros(storage.shape[0], layout.bytes_per_page(spec), dtype=torch.uint8, device=storage.device)
    close_by = replace(given, layout=layout, storage=near)
    assert given.layout is not None, "a far problem is paged"
    near_by, far_away = layout.view(near, spec, 1.0, 1.0), given.layout.view(storage, spec, 1.0, 1.0)
    for to, at in zip(tensors(near_by), tensors(far_away), strict=True):
        to.copy_(at)
    return close_by
