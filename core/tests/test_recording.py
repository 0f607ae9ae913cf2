"""The CPU's stand-in for a device graph: what it repeats, what it leaves as it was, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headstock.device import Device
from headstock.runner.recording import HostSync, record


def test_a_replay_reads_what_its_inputs_hold_then():
    x, out = torch.ones(3, 4), torch.zeros(3, 2)
    weight = torch.arange(8.0).view(2, 4)
    graph = record(lambda: out.copy_(F.linear(x, weight).relu()))
    x.copy_(torch.randn(3, 4))
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, F.linear(x, weight).relu())


def test_a_replay_leaves_results_where_the_recording_left_them():
    x, kept = torch.ones(4), []
    graph = record(lambda: kept.append(x * 2))
    address = kept[0].data_ptr()
    x.fill_(5.0)
    graph.replay()
    assert kept[0].data_ptr() == address
    assert kept[0].tolist() == [10.0] * 4


def test_numbers_of_python_stay_as_they_were_recorded():
    x, out, factor = torch.ones(2), torch.zeros(2), [3.0]
    graph = record(lambda: out.copy_(x * factor[0]))
    factor[0] = 100.0
    graph.replay()
    assert out.tolist() == [3.0, 3.0]


def test_views_in_place_operators_and_lists_of_tensors_are_repeated():
    x, out = torch.arange(6.0), torch.zeros(2)

    def run() -> None:
        first, second = x.view(2, 3).clone().split([1, 2], dim=1)
        second[:, 0].add_(first[:, 0])
        torch.stack([each.sum() for each in second.unbind()], out=out)

    graph = record(run)
    x.mul_(10)
    graph.replay()
    rows = x.view(2, 3)
    assert torch.equal(out, rows[:, 0] + rows[:, 1] + rows[:, 2])


def test_composite_operators_are_recorded_in_inference_mode():
    x, out = torch.ones(2, 3), torch.zeros(2, 3)
    with torch.inference_mode():
        graph = record(lambda: out.copy_(F.layer_norm(x.reshape(3, 2).t(), (3,)).contiguous().view(2, 3).softmax(-1)))
        x.copy_(torch.randn(2, 3))
        graph.replay()
    want = F.layer_norm(x.reshape(3, 2).t(), (3,)).softmax(-1)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool(x.any()), "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: x.repeat_interleave(torch.tensor([1, 2, 3])), "repeat_interleave"),
        (lambda x: x.unique(), "unique"),
    ],
)
def test_a_host_sync_is_named(ask, named):
    x = torch.tensor([1.0, 2.0, 0.0])
    with pytest.raises(HostSync, match=named):
        record(lambda: ask(x))


def test_a_recording_that_failed_leaves_torch_as_it_was():
    with pytest.raises(HostSync):
        record(lambda: torch.ones(1).item())
    assert torch.ones(1).item() == 1.0


def test_the_device_captures_with_the_stand_in_on_a_cpu():
    device, x = Device.open("cpu"), torch.zeros(2)
    with device.warming_up():
        x.add_(1)
    graph = device.capture(lambda: x.add_(1))
    graph.replay()
    assert x.tolist() == [3.0, 3.0]
    assert device.allocations() == 0
