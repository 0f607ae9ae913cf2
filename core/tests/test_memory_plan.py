"""The memory plan: every byte accounted for, and refused in numbers where it does not fit."""

from __future__ import annotations

import pytest
import torch

from headstock.device import Device
from headstock.errors import MemoryPlanError
from headstock.runner.memory import WindowPlan, plan_memory


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
        ({"weights": 9_000}, "single token"),
        ({"weights": 9_900}, "single token"),
        ({"weights": 10**14}, "the weights do not fit into the free memory; given: 93132.26 GiB"),
        ({"weights": 10**9, "kv_tokens": 1}, "a smaller model"),
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


@pytest.mark.parametrize(
    ("given", "pages", "kept", "size"),
    [
        ({}, 25, 10, 25 * 100 + 10 * 100),  # 3,500 bytes of room
        ({"wanted_tokens": 64}, 5, 5, 1_000),
        ({"kv_tokens": 320}, 21, 10, 3_100),
        ({"bytes_per_page": 0}, 10**6 // 16 + 1, 10, 1_000),
        ({"weights": 7_000}, 5, 5, 1_000),
    ],
)
def test_layers_with_a_window_take_no_more_pages_than_they_can_use(given, pages, kept, size):
    given = {"weights": 2_000} | given
    made = plan(windows={4: WindowPlan(10, 100)}, **given)
    assert (made.num_pages, made.windows[4].num_pages, made.kv_cache) == (pages, kept, size)
    assert made.lines()[-1].split() == ["window", "4:", "the", "last", "of", "them", "in", str(kept - 1), "pages"]


def test_what_a_step_takes_to_expand_latent_vectors_is_kept_free():
    without, planned = plan(), plan(expansion=1_000)
    assert planned.kv_cache == without.kv_cache - 500  # a CPU's half of it
    assert [line.split()[0] for line in planned.lines()] == ["weights", "workspaces", "expansion", "KV", "464"]
    with pytest.raises(MemoryPlanError, match="for the rest"):
        plan(expansion=7_000)


def test_the_plan_is_told_by_purpose():
    assert [line.split()[0] for line in plan().lines()] == ["weights", "workspaces", "KV", "544"]
    assert [line.split()[0] for line in plan(scratch=0, state=0).lines()] == ["weights", "KV", "624"]


def test_free_memory_of_this_machine_is_a_number_of_bytes():
    assert Device.open("cpu").free_memory() > 2**20


MIB = 2**20


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("groups", "files", "mib"),
    [
        (None, {}, 1000),
        ("0::/", {}, 1000),
        ("0::/a", {f"{V2}/a/memory.max": "max", f"{V2}/a/memory.current": 1}, 1000),
        ("0::/a", {f"{V2}/a/memory.max": 300, f"{V2}/a/memory.current": 100}, 200),
        ("0::/a", {f"{V2}/a/memory.max": 3000, f"{V2}/a/memory.current": 4}, 1000),
        ("0::/a", {f"{V2}/a/memory.max": 3, f"{V2}/a/memory.current": 4}, 0),
        # Seen from inside a container, its own group is the top of the tree, whatever it is called outside.
        ("0::/a", {f"{V2}/memory.max": 300, f"{V2}/memory.current": 100}, 200),
        ("0::/a/b", {f"{V2}/a/memory.max": 300, f"{V2}/a/memory.current": 250, f"{V2}/a/b/memory.max": 400,
                     f"{V2}/a/b/memory.current": 10}, 50),
        ("0::/a", {f"{V2}/a/memory.max": 300, f"{V2}/a/memory.current": 300,
                   f"{V2}/a/memory.stat": f"anon 5\ninactive_file {MIB * 20}"}, 20),
        ("5:cpu,cpuacct:/x\n4:memory:/a\n1:name=systemd:/b:c", {
            f"{V1}/a/memory.limit_in_bytes": 64, f"{V1}/a/memory.usage_in_bytes": 30,
            f"{V1}/a/memory.stat": f"inactive_file {MIB}\ntotal_inactive_file {MIB * 2}"}, 36),
    ],
)  # fmt: skip
def test_free_memory_is_the_least_that_the_system_and_control_groups_leave(tmp_path, groups, files, mib):
    """Numbers in `files` are MiB; the system has 1000 to give."""
    files = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {1000 * 1024} kB", **files}
    if groups:
        files["proc/self/cgroup"] = groups
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content * MIB if isinstance(content, int) else content}\n", encoding="ascii")
    assert Device.open("cpu").free_memory(tmp_path) == mib * MIB


def test_free_memory_without_any_of_those_files_is_the_machines(tmp_path):
    assert Device.open("cpu").free_memory(tmp_path) > 2**20
