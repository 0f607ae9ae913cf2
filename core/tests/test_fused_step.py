"""What a decode step does beside its layers, fused, against torch's own: on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.backend import GraphBucket
from headstock.device import Device
from headstock.kv.mirror import Mirror
from headstock.models.rope import Rope
from headstock.models.rope_config import RopeConfig
from headstock.runner import static_batch
from headstock.runner.refresh import GroupPages, Refresh
from headstock.runner.sampler import Sampled
from headstock.runner.sampler import greedy as chosen_greedy
from headstock.runner.static_batch import BUFFERS, StaticStep
from headstock.testing.problem import make_spec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton must know before it is first imported
pytest.importorskip("triton")

from headstock.models.fused import Fused  # noqa: E402
from headstock.runner import fused  # noqa: E402

SLOTS, CONTEXT, PAGES = 5, 64, 100
NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.float16, torch.bfloat16]


class Steps:
    """Two layer groups, of which the second has a window with a cache of its own, refreshed in one way or the other."""

    def __init__(self, way: Refresh, n: int, page: int, window: int, table: torch.Tensor, of: torch.Tensor):
        device = Device.open(DEVICE)
        self.mirrors = [Mirror(table, device, table.numel() - 1), Mirror(of, device, 0)]
        fields = {"page_size": page, "max_context": CONTEXT, "device": DEVICE}
        fields["graph_buckets"] = tuple(GraphBucket(size, n) for size in (1, 2, 4))
        groups = {
            "full": (make_spec(fields, [n]), GroupPages(self.mirrors[0].tensor)),
            "window": (make_spec(fields | {"window": window}, [n]), GroupPages(*(m.tensor for m in self.mirrors))),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(static_batch, "refresh", lambda device: way)
            if DEVICE == "cpu":  # whose recorder knows torch's operators alone
                patch.setattr(Device, "capture", lambda self, run, pool=None: SimpleNamespace(replay=run))
            self.static = StaticStep(device, groups, self.mirrors)

    def filled(self, bucket: GraphBucket, changes, *given) -> dict[str, torch.Tensor]:
        """All that a fill leaves, the buffers poisoned before."""
        for batch in self.static.batches[bucket].values():
            for name in BUFFERS[1:]:
                getattr(batch, name).fill_(-7)
        for mirror, own in zip(self.mirrors, changes, strict=True):
            for place, number in own:
                mirror.note(place, [number])
        batches = self.static.fill(bucket, *given)
        left = {f"{group} {name}": getattr(batch, name) for group, batch in batches.items() for name in BUFFERS}
        left |= {f"mirror {i}": mirror.tensor for i, mirror in enumerate(self.mirrors)}
        return left | {"ids": self.static.ids(bucket)}


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_a_fused_refresh_leaves_the_same_bits_as_torchs(data):
    n, page = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4, 16]))
    width, window = CONTEXT // page, data.draw(st.integers(1, CONTEXT))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    table = torch.randint(1, PAGES, (SLOTS + 1, width), generator=draw, dtype=torch.int32)
    of = torch.randint(0, PAGES, (PAGES,), generator=draw, dtype=torch.int32)
    table[SLOTS], of[0] = 0, 0
    ways = [Steps(way, n, page, window, table, of) for way in (Refresh(), fused.FusedRefresh())]
    for _ in range(3):
        bucket = data.draw(st.sampled_from(ways[0].static.buckets))
        count = data.draw(st.integers(0, bucket.batch))
        slots = data.draw(st.permutations(range(SLOTS)))[:count]
        lens = data.draw(st.lists(st.integers(n, CONTEXT), min_size=count, max_size=count))
        tokens = data.draw(st.lists(st.integers(0, 99), min_size=count * n, max_size=count * n))
        places = [st.integers(0, SLOTS * width - 1), st.integers(1, PAGES - 1)]
        changes = [data.draw(st.lists(st.tuples(at, st.integers(0, PAGES - 1)), max_size=6)) for at in places]
        want, got = (each.filled(bucket, changes, slots, lens, "replay", tokens) for each in ways)
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), name


def test_a_fused_refresh_of_no_mirror_and_many_columns():
    fields = {"page_size": 1, "max_context": 2600, "device": DEVICE, "graph_buckets": (GraphBucket(2),)}
    spec, table = make_spec(fields, [1]), torch.arange(3 * 2600, dtype=torch.int32, device=DEVICE).view(3, 2600)
    table[2] = 0
    left = []
    for way in (Refresh(), fused.FusedRefresh()):
        [batch] = StaticStep(Device.open(DEVICE), {"all": (spec, GroupPages(table))}).batches[GraphBucket(2)].values()
        written = torch.arange(700)
        written, inputs = written.pin_memory() if DEVICE == "cuda" else written, torch.zeros_like(written).to(DEVICE)
        way.fetch(written, inputs, [], slice(4, 4))
        assert inputs.tolist() == list(range(700))
        slots, lens = (torch.tensor(each, device=DEVICE) for each in ([1, 0], [2600, 1025]))
        way.derive(batch, GroupPages(table), spec, slots, lens)
        left.append([getattr(batch, name).clone() for name in BUFFERS])
    assert all(torch.equal(*pair) for pair in zip(*left, strict=True))
    assert left[0][3].count_nonzero() == 2600 + 1024, "every page but the null page"


@st.composite
def rows_of_logits(draw):
    """Rows with few distinct values, so that many tie, and here and there one that is no number."""
    vocab = draw(st.sampled_from([1, 5, 97, 1024, 1025, 3000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randint(-3, 3, (draw(st.integers(1, 5)), vocab), generator=generator).float()
    for row in logits:
        match draw(st.sampled_from(["plain", "plain", "some", "all"])):
            case "some":
                for _ in range(draw(st.integers(1, 3))):
                    row[draw(st.integers(0, vocab - 1))] = draw(st.sampled_from([NAN, INF, -INF]))
            case "all":
                row[:] = -INF
    return logits


@settings(deadline=None, max_examples=50)
@given(logits=rows_of_logits(), dtype=st.sampled_from(DTYPES), kept=st.booleans(), strided=st.booleans())
def test_the_fused_greedy_token_is_the_first_of_the_greatest(logits, dtype, kept, strided):
    want = chosen_greedy(logits.double())  # which no kernel takes
    given_ = logits.to(DEVICE, dtype)
    if strided:
        given_ = torch.cat((given_, given_), 1)[:, : logits.shape[1]]
    copy = torch.full((len(logits) + 1, logits.shape[1]), 9.0, dtype=dtype, device=DEVICE) if kept else None
    got = Sampled(*fused.greedy(given_, None if copy is None else copy[:-1]))
    assert got.failed.dtype == torch.bool
    assert got.failed.tolist() == want.failed.tolist()
    assert got.tokens.dtype == torch.int64
    counts = ~want.failed
    assert got.tokens.cpu()[counts].tolist() == want.tokens[counts].tolist()
    assert bool(((got.tokens >= 0) & (got.tokens < logits.shape[1])).all())
    if copy is not None:
        assert torch.equal(copy[:-1].nan_to_num(7.5), given_.nan_to_num(7.5))
        assert bool((copy[-1] == 9).all()), "no more rows than there are"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 64, 96, 128])
@pytest.mark.parametrize("factor", [1.0, 1.3688])
def test_fused_tables_are_torchs_within_a_rounding(dtype, dim, factor):
    """Within one unit in the last place; float32 shows that libraries differ in that of a cosine, before the factor."""
    rope = Rope(RopeConfig(rope_theta=500000.0), dim, DEVICE)
    rope.attention_factor = factor
    positions = torch.tensor([0, 1, 7, 4095, 8191, 32768, 131071], device=DEVICE)
    angles = (positions[:, None, None].float() * rope.frequencies).double()  # rounded; nothing after it is
    exact = angles.cos() * factor, angles.sin() * factor * rope.signs
    tables = zip(Fused().tables(rope, positions, dtype), rope.tables(positions, dtype), exact, strict=True)
    for table, torchs, want in tables:
        assert (table.shape, table.dtype) == (torchs.shape, dtype)
        info = torch.finfo(dtype)
        unit = info.eps * want.abs().clamp(min=info.tiny).log2().floor().exp2()
        units = 3 if dtype == torch.float32 else 1
        assert bool(((table.double() - torchs.double()).abs() <= units * unit).all())
        assert bool(((table.double() - want).abs() <= units * unit).all())


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus_that_need_not_be_here(capability, tmp_path):
    script = Path(__file__).with_name("compiled_step.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, script, str(capability)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 18
