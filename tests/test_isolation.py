"""Broken plugins beside sound ones, installed from wheels in one environment: each harms itself alone, and is named."""

from __future__ import annotations

import json
import sys

import pytest

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}-dist"
version = "1.5"
dependencies = ["headstock>=0.1", "torch"]

[project.entry-points.headstock]
{name} = "isolated_{name}"

[tool.hatch.build.targets.wheel]
packages = ["isolated_{name}"]
"""
OFFER = """
from headstock import ANY, Capabilities, Offer, hookimpl


@hookimpl
def attention_backends():
    can = Capabilities(
        devices={{"cpu"}}, phases={{"extend", "decode"}}, attention={{"paged"}}, dtypes={{"float32", "bfloat16"}},
        head_dims=ANY, page_sizes=ANY, kv_layouts={{"nhd"}}, host_lengths="exact", preference={preference},
    )
    return [Offer(name="{name}", backend=f"{{__name__}}.backend:Backend", capabilities=can{more})]
"""
BACKEND = '''
"""Attention by torch's SDPA, one request at a time, over keys collected from their pages."""
import torch
import torch.nn.functional as F

from headstock import AttentionBackend


class Sound(AttentionBackend):
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
        layer.kv.write(k, v, batch.out_cache_loc)
        for queries, slots, seen in batch.metadata:
            heads_first = (x.transpose(0, 1) for x in (q[queries], *layer.kv.gather(slots)))
            result = F.scaled_dot_product_attention(*heads_first, seen, scale=self.spec.scale, enable_gqa=True)
            out[queries] = result.transpose(0, 1)


class Backend(Sound):
    pass
'''
SHOUT = "import os\nprint('printed')\nos.system('echo echoed')\n"


def offer(name: str, preference: float = 1.0, more: str = "") -> str:
    return OFFER.format(name=name, preference=preference, more=more)


# Manifests by plugin. Those of the last list end, stop or delay the process that lists them.
SOUND = {
    "steady": offer("steady", 3.0),
    "noisy": SHOUT + offer("noisy"),
    "constructor": offer("constructor", 9.0),  # sound to look at; preferred to all others until they are run
    "planning": offer("planning", 8.0),
    "kernel": offer("kernel", 7.0),
}
BROKEN = {
    "raises": "raise OSError('libkernel.so: no such file')",
    "exits": "import sys\nsys.exit(0)",
    "hooked": "from headstock import hookimpl\n\n\n@hookimpl\ndef attention_backends():\n    return 1 / 0\n",
    "newer": offer("newer", more=", api_version=2"),
    "left": offer("twin"),
    "right": offer("twin"),
}
TROUBLE = {
    "heavy": "import torch\n" + offer("heavy"),
    "vanishes": "import os\nos._exit(0)",
    "crashes": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "import time\ntime.sleep(600)",
}
METHODS = {
    "constructor": "__init__(self, spec, workspace):\n        raise RuntimeError('built for another torch')",
    "planning": "init_forward_metadata(self, batch):\n        raise ValueError('no plan for this batch')",
    "kernel": "forward(self, q, k, v, layer, batch, *, out, lse=None):\n        raise SystemExit('no such opcode')",
    "noisy": "init_forward_metadata(self, batch):\n        assert batch.num_tokens < 9, 'lost on the way'\n"
    "        super().init_forward_metadata(batch)",
}
FAULTS = {
    "raises": "OSError: libkernel.so: no such file",
    "exits": "SystemExit: 0",
    "hooked": "ZeroDivisionError: division by zero",
    "newer": "newer needs API version 2, this headstock speaks 1",
    "left": "the backend 'twin' is offered twice, by left-dist and right-dist",
    "right": "the backend 'twin' is offered twice, by left-dist and right-dist",
    "constructor": "RuntimeError: built for another torch",
    "planning": "ValueError: no plan for this batch",
    "kernel": "SystemExit: no such opcode",
}
HOST = ("headstock", "headstock-torch-native")
NO_TROUBLE = ",".join(f"-{name}" for name in TROUBLE)
BUILD = """
import os, sys
from hatchling.build import build_wheel
for folder in sys.argv[2:]:
    os.chdir(folder)
    build_wheel(sys.argv[1])
"""


@pytest.fixture(scope="module")
def site(environment, members, wheels, run, tmp_path_factory):
    """One environment with the wheels of the host, of a backend that can stand in for any, and of each plugin."""
    root, built = tmp_path_factory.mktemp("plugins"), tmp_path_factory.mktemp("wheels")
    for name, manifest in (SOUND | BROKEN | TROUBLE).items():
        package = root / name / f"isolated_{name}"
        package.mkdir(parents=True)
        (root / name / "pyproject.toml").write_text(PYPROJECT.format(name=name), encoding="utf-8")
        (package / "__init__.py").write_text(manifest, encoding="utf-8")
        backend = BACKEND.replace("    pass\n", f"    def {METHODS[name]}\n") if name in METHODS else BACKEND
        (package / "backend.py").write_text((SHOUT if name == "noisy" else "") + backend, encoding="utf-8")
    run(sys.executable, "-c", BUILD, built, *root.iterdir(), cwd=root)
    ours = [wheel for each, wheel in zip(members, wheels, strict=True) if each.name in HOST]
    made = environment()
    made.pip("install", "--no-index", "--no-deps", *ours, *built.iterdir())
    return made


@pytest.fixture(scope="module")
def generate(site, tiny_model):
    """Runs `headstock generate` among the plugins that a process survives."""

    def generate(prompt, *arguments, verbose=False, code=0, plugins=NO_TROUBLE):
        command = ("headstock", *(["--verbose"] if verbose else []), "generate", prompt, "--raw", "--device", "cpu")
        asked = ("--model", tiny_model, "--max-tokens", 4, *arguments)
        return site.run(*command, *asked, code=code, HEADSTOCK_PLUGINS=plugins)

    return generate


def test_plugins_lists_all_and_each_fault_with_its_plugin_distribution_version_and_cure(site):
    done = site.run("headstock", "plugins", "--json", HEADSTOCK_PLUGINS=NO_TROUBLE)
    listed = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    assert sorted(listed) == sorted([*SOUND, *BROKEN, "torch-native"])
    assert {name for name, plugin in listed.items() if plugin["status"] == "broken"} == set(BROKEN)
    for name in BROKEN:
        plugin = listed[name]
        assert (plugin["distribution"], plugin["distribution_version"]) == (f"{name}-dist", "1.5")
        assert plugin["fault"]["what"] == FAULTS[name]
        assert plugin["fault"]["cure"]
    assert done.stderr.splitlines() == ["printed", "echoed"]
    for_people = " ".join(site.run("headstock", "plugins", HEADSTOCK_PLUGINS=NO_TROUBLE).stdout.split())
    for name in BROKEN:
        assert f"{name} is broken: {FAULTS[name]} cure: {listed[name]['fault']['cure']}" in for_people


def test_backends_and_explain_tell_of_sound_and_broken_ones(site, tiny_model):
    done = site.run("headstock", "backends", "--json", HEADSTOCK_PLUGINS=NO_TROUBLE)
    backends = [(each["name"], each["distribution"], each["fault"]) for each in json.loads(done.stdout)["backends"]]
    assert {name for name, _, fault in backends if fault is None} == {*SOUND, "torch-native"}
    broken = {distribution: fault["what"] for _, distribution, fault in backends if fault}
    assert broken == {f"{name}-dist": FAULTS[name] for name in BROKEN}
    asked = ("headstock", "explain", "--device", "cpu", "--cascade", "off", "--model", tiny_model, "--json")
    decision = json.loads(site.run(*asked, HEADSTOCK_PLUGINS=NO_TROUBLE).stdout)
    assert {winner["backend"] for choice in decision["choices"] for winner in choice["winners"]} == {"constructor"}
    refused = {each["source"]: each["fault"]["what"] for each in decision["refused"] if each["fault"]}
    assert refused == {f"{name}-dist 1.5": FAULTS[name] for name in BROKEN}


def test_what_was_chosen_by_itself_and_fails_is_passed_over_loudly_until_one_runs(generate):
    chosen, alone = generate("丁万丈"), generate("丁万丈", plugins="torch-native")
    assert chosen.stdout == alone.stdout
    assert "steady (steady-dist 1.5)" in chosen.stderr
    notices = [line for line in chosen.stderr.splitlines() if line.startswith("notice: ")]
    assert len(notices) == 3
    for name, notice in zip(("constructor", "planning", "kernel"), notices, strict=True):
        assert notice == (
            f"notice: the backend {name} ({name}-dist 1.5) failed: {FAULTS[name]}; choosing again without {name}"
        )


@pytest.mark.parametrize("name", ["constructor", "planning", "kernel"])
def test_what_was_asked_for_by_name_and_fails_is_refused_with_its_traceback_where_wanted(generate, name):
    done = generate("丁", "--attention-backend", name, code=2, verbose=True)
    *traceback, last = [line for line in done.stderr.splitlines() if line not in ("printed", "echoed")]
    assert done.stdout == ""
    assert last.startswith(f"headstock: the backend {name} ({name}-dist 1.5) failed: {FAULTS[name]}")
    assert last.endswith(f"type: headstock check {name}")
    assert any(f"isolated_{name}" in line and "backend.py" in line for line in traceback)
    assert traceback.count("Traceback (most recent call last):") == 2


def test_a_refusal_is_one_line_unless_more_is_wanted(generate):
    done = generate("丁", "--attention-backend", "kernel", code=2, plugins="kernel,steady")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("headstock: the backend kernel (kernel-dist 1.5) failed: ")


def test_what_a_backend_prints_stays_out_of_the_text(generate):
    done = generate("丁万丈", "--attention-backend", "noisy", "--quiet", plugins="noisy")
    assert len(done.stdout.strip()) == 4
    assert set(done.stderr.splitlines()) == {"printed", "echoed"}


def test_a_backend_that_fails_in_a_run_is_named(generate):
    told = generate("丁" * 9, "--attention-backend", "noisy", code=1, plugins="noisy").stderr
    assert "a step of noisy (noisy-dist 1.5) failed: AssertionError: lost on the way" in told
    assert told.endswith("type: headstock check noisy\n")
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_plugin_that_hangs_is_named_and_the_others_are_listed(site):
    done = site.run("headstock", "plugins", "--json", HEADSTOCK_PLUGINS="hangs,heavy,steady")
    hanging, *others = json.loads(done.stdout)["plugins"]
    assert (hanging["name"], hanging["status"], hanging["distribution"]) == ("hangs", "broken", "hangs-dist")
    assert hanging["fault"]["what"] == "it has not finished loading after 10 s"
    assert "HEADSTOCK_PLUGINS=-hangs" in hanging["fault"]["cure"]
    assert [(plugin["name"], plugin["status"]) for plugin in others] == [("heavy", "ok"), ("steady", "ok")]
    assert "'hangs' (hangs-dist)" in done.stderr


@pytest.mark.slow
def test_doctor_survives_them_all(site):
    done = site.run("headstock", "doctor", "--json", code=1)
    report = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    assert sorted(report) == sorted([*SOUND, *BROKEN, *TROUBLE, "torch-native"])
    told = {name: FAULTS[name] for name in BROKEN} | {
        "heavy": "its manifest imports torch",
        "vanishes": "loading it ended the process with exit code 0",
        "crashes": "loading it killed the process with SIGSEGV",
        "hangs": "it has not finished loading after 10 s",
    }
    assert {name for name, plugin in report.items() if plugin["faults"]} == set(told)
    for name, words in told.items():
        [fault] = report[name]["faults"]
        assert fault["what"].startswith(words)
        assert fault["cure"]
        assert report[name]["distribution"] == f"{name}-dist 1.5"
