"""The memory plan: every byte accounted for, and refused in numbers where it does not fit."""

from __future__ import annotations

import pytest
import torch

from headstock.device import Device
from headstock.errors import MemoryPlanError
from headstock.runner.memory import plan_memory


class Fixed(Device):
    """A device with a set amount of free memory."""

    def free_memory(self):
        return 10_000


def plan(kind="cpu", **given):
    sizes = {
        "weights": 2_000, "scratch": 300, "state": 700, "bytes_per_page": 100, "page_size": 16, "wanted_tokens": 10**6,
        "least_tokens": 1,
    }  # fmt: skip
    return plan_memory(Fixed(torch.device(kind), kind), **sizes | given)


def test_the_cache_takes_a_share_of_what_the_rest_leaves():
    cpu, gpu = plan(), plan("cuda")
    assert (cpu.num_pages, cpu.kv_tokens, cpu.kv_cache) == (35, 34 * 16, 3_500)
    assert (gpu.num_pages, gpu.kv_tokens) == (63, 62 * 16)


def test_no_more_is_taken_than_can_be_used_and_the_null_page_comes_on_top():
    small = plan(wanted_tokens=33)
    assert (small.num_pages, small.kv_tokens) == (4, 48)


@pytest.mark.parametrize(("tokens", "pages"), [(1, 2), (16, 2), (17, 3), (1088, 69)])
def test_a_number_of_tokens_that_the_user_fixed_is_kept_in_whole_pages(tokens, pages):
    fixed = plan(kv_tokens=tokens)
    assert fixed.num_pages == pages
    assert fixed.kv_tokens >= tokens


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_tokens": 0}, "at least 1 tokens"),
        ({"kv_tokens": -5}, "at least 1 tokens"),
        ({"weights": 9_900}, "single token"),
        ({"weights": 10**9}, "single token"),
        ({"least_tokens": 1000}, "--kv-tokens 1000"),
        ({"kv_tokens": 8, "least_tokens": 40}, "given: 16 tokens"),
        ({"kv_tokens": 16 * 70}, "at most 544 tokens"),
        ({"kv_tokens": 16, "weights": 9_000}, "at most 0 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sizes(given, said):
    with pytest.raises(MemoryPlanError) as caught:
        plan(**given)
    assert said in str(caught.value)
    assert "GiB" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_plan_is_told_by_purpose():
    assert [line.split()[0] for line in plan().lines()] == ["weights", "workspaces", "KV", "544"]
    assert [line.split()[0] for line in plan(scratch=0, state=0).lines()] == ["weights", "KV", "624"]


def test_free_memory_of_this_machine_is_a_number_of_bytes():
    assert Device.open("cpu").free_memory() > 2**20
