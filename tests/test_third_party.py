"""A plugin by somebody else: written against the public API alone, installed from a wheel, used, and uninstalled."""

from __future__ import annotations

import json

import pytest

FILES = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "faceplate-attention"
version = "2.3"
dependencies = ["headstock>=0.1", "torch"]

[project.entry-points.headstock]
faceplate = "faceplate"

[tool.hatch.build.targets.wheel]
packages = ["faceplate"]
""",
    "faceplate/__init__.py": '''
"""The manifest: what is on offer, as data."""
from headstock import ANY, Capabilities, Offer, hookimpl


@hookimpl
def attention_backends():
    can = Capabilities(
        devices={"cpu"}, phases={"extend", "decode"}, attention={"paged"}, dtypes={"float32", "bfloat16"},
        head_dims=ANY, page_sizes=ANY, kv_layouts={"nhd", "hnd"}, host_lengths="exact",
    )
    return [Offer(name="faceplate", backend="faceplate.backend:Faceplate", capabilities=can)]
''',
    "faceplate/backend.py": '''
"""Attention by torch's SDPA, one request at a time, over keys collected from their pages."""
import torch
import torch.nn.functional as F

from headstock import AttentionBackend


class Faceplate(AttentionBackend):
    def init_forward_metadata(self, batch):
        starts, size = batch.query_indptr_cpu.tolist(), batch.page_size
        batch.metadata = []
        for row, length in enumerate(batch.seq_lens_cpu.tolist()):
            keys = torch.arange(length)
            slots = batch.page_table[row, keys // size].long() * size + keys % size
            queries = slice(starts[row], starts[row + 1])
            new = queries.stop - queries.start
            batch.metadata.append((queries, slots, torch.ones(new, length, dtype=torch.bool).tril(length - new)))

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        if k is not None:
            layer.kv.write(k, v, batch.out_cache_loc)
        for queries, slots, seen in batch.metadata:
            heads_first = (x.transpose(0, 1) for x in (q[queries], *layer.kv.gather(slots)))
            result = F.scaled_dot_product_attention(*heads_first, seen, scale=self.spec.scale, enable_gqa=True)
            out[queries] = result.transpose(0, 1)
''',
}
PROMPTS = ("丁万丈", "丠両丢丣两严並", "丰")


@pytest.fixture(scope="module")
def wheel(build, tmp_path_factory):
    """The plugin as its author would publish it."""
    folder = tmp_path_factory.mktemp("faceplate")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    [wheel] = build(folder)
    return wheel


@pytest.fixture
def site(environment, wheels, wheel):
    """An environment with the workspace's wheels and, beside them, the plugin's."""
    made = environment()
    made.pip("install", "--no-index", "--no-deps", *wheels, wheel)
    return made


def test_a_third_party_plugin_appears_runs_when_asked_for_and_disappears(site, tiny_model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    command = (
        "headstock", "generate", "--prompt-file", prompts, "--raw", "--model", tiny_model, "--device", "cpu",
        "--max-tokens", 16, "--page-size", 4, "--attention-backend",
    )  # fmt: skip

    plugins = json.loads(site.run("headstock", "plugins", "--json").stdout)["plugins"]
    [listed] = [plugin for plugin in plugins if plugin["name"] == "faceplate"]
    assert (listed["status"], listed["distribution"], listed["backends"]) == (
        "ok",
        "faceplate-attention",
        ["faceplate"],
    )

    theirs, ours = site.run(*command, "faceplate"), site.run(*command, "torch-native")
    assert "faceplate (faceplate-attention 2.3)" in theirs.stderr
    assert "faceplate" not in ours.stderr
    texts = [[json.loads(line)["text"] for line in done.stdout.splitlines()] for done in (theirs, ours)]
    assert texts[0] == texts[1]
    assert [len(text) for text in texts[0]] == [16] * len(PROMPTS)

    site.pip("uninstall", "--yes", "faceplate-attention")
    assert "faceplate" not in site.run("headstock", "plugins", "--json").stdout
    refusal = site.run(*command, "faceplate", code=2).stderr
    assert refusal.startswith("headstock: ")
    assert "faceplate" in refusal
    assert "Traceback" not in refusal
