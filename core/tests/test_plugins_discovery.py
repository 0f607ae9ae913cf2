"""Discovery over real distributions on the path: each fault is its plugin's own, has a cure, and disturbs no other."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from headstock import discover, plugins
from headstock.offer import API_VERSION, Fault
from headstock.plugins import entry_points, installed
from headstock.prints import stdout_to_stderr

OFFER = """
from headstock import ANY, Capabilities, Offer, hookimpl

CAN = Capabilities(
    devices={"cpu"}, phases={"extend", "decode"}, attention={"paged"}, dtypes={"float32"}, head_dims=ANY,
    page_sizes=ANY, kv_layouts={"nhd"},
)

@hookimpl
def attention_backends():
    return [Offer(name="NAME", backend="nowhere.at_all:Backend", capabilities=CAN)]
"""
HEADER = "from headstock import hookimpl\n"
_serial = itertools.count()


class Site:
    """A folder on the path that distributions can be put into."""

    def __init__(self, folder):
        self.folder = folder
        self.modules = []

    def add(self, name, source=None, *, distribution=None, version="1.0", requires=(), points=None, metadata=True):
        """A distribution with the plugin `name` and its module; by default it is healthy and offers a backend."""
        module = f"plugin_{name.replace('-', '_')}_{next(_serial)}"
        source = OFFER.replace("NAME", name) if source is None else textwrap.dedent(source)
        (self.folder / f"{module}.py").write_text(source, encoding="utf-8")
        distribution = distribution or f"{name}-dist"
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        if metadata:
            lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
            lines += [f"Requires-Dist: {line}" for line in requires]
            (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        points = points or f"{name} = {module}"
        (info / "entry_points.txt").write_text(f"[headstock]\n{points}\n", encoding="utf-8")
        self.modules.append(module)
        return module

    def run(self, code, **environment):
        """What Python prints for `code`, with this folder on its path and no plugin but those in it."""
        env = {key: value for key, value in os.environ.items() if key != "HEADSTOCK_PLUGINS"}
        path = [str(self.folder), *filter(None, [env.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(path), **environment}
        command = [sys.executable, "-c", textwrap.dedent(code)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("HEADSTOCK_PLUGINS", raising=False)
    here = Site(folder)
    yield here
    for module in here.modules:
        sys.modules.pop(module, None)


def load(*names):
    """The plugins of these names, by name."""
    found = {plugin.name: plugin for plugin in installed(names)}
    assert set(found) == set(names)
    return found


def test_a_healthy_plugin_is_found_with_its_origin_hooks_and_offer(site):
    module = site.add("alpha", version="2.5")
    [plugin] = installed(["alpha"])
    assert (plugin.name, plugin.distribution, plugin.version, plugin.module) == ("alpha", "alpha-dist", "2.5", module)
    assert plugin.fault is None
    assert plugin.hooks == ("attention_backends",)
    [candidate] = discover(["alpha"])
    assert candidate.usable
    assert (candidate.name, candidate.source) == ("alpha", "alpha-dist 2.5")


BROKEN = {
    "imports what is not there": ("import no_such_kernels", ["'no_such_kernels'", "not installed"]),
    "import error": ("from os import no_such_name", ["ImportError", "no_such_name"]),
    "missing library": ("raise OSError('libcuda.so.1: cannot open shared object')", ["OSError", "libcuda.so.1"]),
    "stale build": ("raise RuntimeError('built for another torch\\nlong story')", ["RuntimeError: built for another"]),
    "says nothing": ("raise RuntimeError", ["RuntimeError"]),
    "exits on import": ("import sys; sys.exit(3)", ["SystemExit", "3"]),
    "syntax error": ("def f(:", ["SyntaxError"]),
    "exits in its hook": (HEADER + "@hookimpl\ndef attention_backends():\n    raise SystemExit('no gpu')", ["no gpu"]),
    "recursion": (HEADER + "def f(): f()\nf()", ["RecursionError"]),
    "returns nothing": (HEADER + "@hookimpl\ndef attention_backends():\n    pass", ["list of Offer", "None"]),
    "returns strings": (
        HEADER + "@hookimpl\ndef attention_backends():\n    return ['fast']",
        ["list of Offer", "fast"],
    ),
    "misspelt hook": (HEADER + "@hookimpl\ndef atention_backends():\n    return []", ["did you mean 'attention_back"]),
    "unknown hook": (HEADER + "@hookimpl\ndef zzz():\n    return []", ["'zzz'", "is no hook"]),
    "unknown argument": (
        HEADER + "@hookimpl\ndef before_forward(batch, stream):\n    pass",
        ["stream", f"API version {API_VERSION}"],
    ),
    "no hook at all": ("x = 1", ["implements no hook", "attention_backends"]),
    "misspelt axis": (OFFER.replace("page_sizes", "page_size"), ["'page_size'", "did you mean 'page_sizes'"]),
    "forgotten axis": (OFFER.replace("head_dims=ANY,", ""), ["forgets head_dims"]),
    "unknown value": (OFFER.replace('{"float32"}', '{"float33"}'), ["float33"]),
    "misspelt field": (OFFER.replace("backend=", "backends="), ["'backends'", "did you mean 'backend'"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_described_and_disturbs_nobody(site, case):
    source, said = BROKEN[case]
    site.add("aaa-healthy")
    site.add("broken", source)
    site.add("zzz-healthy")
    found = load("aaa-healthy", "broken", "zzz-healthy")
    fault = found["broken"].fault
    assert all(words in fault.what for words in said), fault.what
    assert "\n" not in fault.what
    assert "pip uninstall broken-dist" in fault.cure
    assert "Traceback" in fault.detail or "Error" in fault.detail
    assert [found[name].fault for name in ("aaa-healthy", "zzz-healthy")] == [None, None]
    candidate = next(each for each in discover(list(found)) if each.name == "broken")
    assert not candidate.usable
    assert candidate.source == "broken-dist 1.0"


def test_two_plugins_broken_at_once_each_keep_their_own_fault(site):
    site.add("one", "raise ImportError('first')")
    site.add("two", "import sys; sys.exit()")
    site.add("whole")
    found = load("one", "two", "whole")
    assert "first" in found["one"].fault.what
    assert "SystemExit" in found["two"].fault.what
    assert found["whole"].fault is None


def test_an_interrupt_is_not_a_plugins_fault(site):
    site.add("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        installed(["slow"])


@pytest.mark.parametrize(
    ("version", "cure"),
    [(API_VERSION + 1, "pip install -U headstock"), (API_VERSION - 1, "newer release of the plugin")],
)
def test_another_api_version_names_both_and_who_should_move(site, version, cure):
    site.add(
        "other", OFFER.replace("NAME", "other").replace("capabilities=CAN", f"capabilities=CAN, api_version={version}")
    )
    fault = load("other")["other"].fault
    assert f"API version {version}" in fault.what
    assert f"speaks {API_VERSION}" in fault.what
    assert cure in fault.cure
    [candidate] = discover(["other"])
    assert candidate.offer is not None, "what it offers is still worth showing"
    assert not candidate.usable


def test_a_package_that_a_plugin_requires_is_checked_by_distribution_name(site):
    # The distribution is called otherwise than the module that it would bring.
    site.add("kernels", requires=["kernels-python-nobody-has>=0.6", "pluggy"])
    site.add("fenced", requires=['kernels-python-nobody-has; python_version < "3"', 'no-such; extra == "gpu"'])
    site.add("dated", requires=["pluggy>=99"])
    found = load("kernels", "fenced", "dated")
    assert found["kernels"].fault.what == "it requires kernels-python-nobody-has>=0.6, which is not installed"
    assert found["kernels"].fault.cure == 'pip install "kernels-python-nobody-has>=0.6"'
    assert found["fenced"].fault is None
    assert "it requires pluggy>=99, installed is " in found["dated"].fault.what
    assert found["dated"].fault.cure == 'pip install "pluggy>=99"'


def test_an_import_that_fails_for_want_of_a_required_package_names_the_package(site):
    site.add("eager", "import no_such_kernels", requires=["no-such-kernels-python>=2"])
    fault = load("eager")["eager"].fault
    assert fault.what == "it requires no-such-kernels-python>=2, which is not installed"
    assert "No module named 'no_such_kernels'" in fault.detail


def test_an_import_that_nothing_installed_explains_is_mended_by_what_brings_it(site):
    site.add("careless", "import no_such_kernels.fast")
    site.add("torn", points="torn = no_such_module")
    found = load("careless", "torn")
    brought = "install what brings 'no_such_kernels', which it does not require by name, or pip uninstall careless-dist"
    assert found["careless"].fault.cure == brought
    assert found["torn"].fault.cure == "reinstall or remove it: pip uninstall torn-dist"


def test_a_plugin_name_taken_twice_names_both_distributions_and_loads_neither(site):
    site.add("same", distribution="first-dist")
    site.add("same", distribution="second-dist")
    both = installed(["same"])
    assert [plugin.distribution for plugin in both] == ["first-dist", "second-dist"]
    for plugin in both:
        assert "first-dist and second-dist" in plugin.fault.what
        assert plugin.fault.cure == f"pip uninstall {plugin.distribution}, or the other"
    assert not set(site.modules) & set(sys.modules)


def test_spelling_does_not_make_a_name_another_and_nor_does_a_fork_with_the_same_module(site):
    module = site.add("my-kernels", distribution="one")
    site.add("My_Kernels", distribution="two", points=f"My_Kernels = {module}")
    site.add("my.kernels", distribution="three", points=f"my.kernels = {module}")
    found = installed(["my-kernels"])
    assert len(found) == 3
    assert all("one and three and two" in plugin.fault.what for plugin in found)


@pytest.mark.parametrize("distributions", [("one", "two"), ("one", "one")])
def test_a_backend_offered_twice_is_offered_by_neither(site, distributions):
    offer = OFFER.replace("NAME", "twin")
    if len(set(distributions)) == 2:
        for name, distribution in zip(("left", "right"), distributions, strict=True):
            site.add(name, offer, distribution=distribution)
    else:
        module = site.add("left", offer, distribution="one", points=" ")
        next(site.folder.glob("one*/entry_points.txt")).write_text(f"[headstock]\nleft = {module}\nright = {module}\n")
    site.add("other")
    found = load("left", "right", "other")
    for name in ("left", "right"):
        assert "the backend 'twin' is offered twice" in found[name].fault.what
        assert all(distribution in found[name].fault.what for distribution in distributions)
    assert found["other"].fault is None


def test_what_a_plugin_prints_does_not_reach_standard_output_and_nothing_imports_torch(site):
    site.add(
        "noisy",
        "print('hello from import')\n"
        + OFFER.replace("NAME", "noisy").replace("    return", "    print('and from the hook')\n    return"),
    )
    site.add("broken", "import sys; sys.exit(1)")
    done = site.run(
        """
        import json, sys
        from headstock import discover
        names = {each.name: each.usable for each in discover()}
        heavy = {"torch", "transformers", "numpy", "rich"}
        print(json.dumps([names, sorted(heavy & set(sys.modules))]))
        """,
        HEADSTOCK_PLUGINS="noisy,broken",
    )
    assert json.loads(done.stdout) == [{"noisy": True, "broken": False}, []]
    assert "hello from import" in done.stderr
    assert "and from the hook" in done.stderr


ALLOWED = {
    "": set(),
    " , ": set(),
    "alpha": {"alpha"},
    "alpha,beta-two": {"alpha", "beta-two"},
    " ALPHA , Beta_Two ": {"alpha", "beta-two"},
    "alpha,beta-two,-alpha": {"beta-two"},
    "-beta.two": {"alpha"},
}


@pytest.mark.parametrize("given", ALLOWED)
def test_the_allow_list_says_what_is_imported_at_all(site, monkeypatch, given):
    site.add("alpha")
    site.add("beta-two")
    monkeypatch.setenv("HEADSTOCK_PLUGINS", given)
    assert {plugin.name for plugin in installed()} & {"alpha", "beta-two"} == ALLOWED[given]
    loaded = {name for name, module in zip(("alpha", "beta-two"), site.modules, strict=True) if module in sys.modules}
    assert loaded == ALLOWED[given]


def test_an_argument_overrules_the_environment_and_may_be_any_iterable(site, monkeypatch):
    site.add("alpha")
    site.add("beta")
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "beta")
    assert [plugin.name for plugin in installed(name for name in ["alpha", "beta", "-beta"])] == ["alpha"]


@pytest.mark.parametrize(
    ("given", "hint"), [("alpah", "did you mean 'alpha'?"), ("-alpah,alpha", "'alpha'"), ("q", "installed: ")]
)
def test_an_unknown_name_in_the_allow_list_warns_with_what_is_known(site, monkeypatch, given, hint):
    site.add("alpha")
    monkeypatch.setenv("HEADSTOCK_PLUGINS", given)
    with pytest.warns(UserWarning, match="names no installed plugin") as caught:
        installed()
    assert hint in str(caught[0].message)


def test_a_plugin_left_out_may_be_broken(site, monkeypatch):
    site.add("alpha")
    module = site.add("killer", "raise KeyboardInterrupt")
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "-killer")
    assert "alpha" in {plugin.name for plugin in installed()}
    assert module not in sys.modules


def test_a_distribution_that_is_visible_twice_counts_once_and_the_first_on_the_path_wins(site, tmp_path, monkeypatch):
    site.add("alpha", version="1.0")
    nearer = Site(tmp_path / "nearer")
    nearer.folder.mkdir()
    nearer.add("alpha", version="2.0")
    monkeypatch.syspath_prepend(str(nearer.folder))
    [plugin] = installed(["alpha"])
    assert (plugin.version, plugin.fault) == ("2.0", None)
    egg = site.folder / "alpha_dist.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: alpha-dist\nVersion: 0.1\n", encoding="utf-8")
    (egg / "entry_points.txt").write_text(f"[headstock]\nalpha = {site.modules[0]}\n", encoding="utf-8")
    assert [plugin.version for plugin in installed(["alpha"])] == ["2.0"]


@pytest.mark.parametrize("value", ["gone_module_x", "os:no_attr.x y", "!!"])
def test_an_entry_point_that_leads_nowhere_is_a_fault_of_its_own(site, value):
    site.add("lost", points=f"lost = {value}")
    site.add("alpha")
    found = load("lost", "alpha")
    assert found["lost"].fault.what
    assert "pip uninstall lost-dist" in found["lost"].fault.cure
    assert found["alpha"].fault is None


def test_a_distribution_without_metadata_is_no_end_of_the_world(site):
    site.add("bare", metadata=False)
    site.add("alpha")
    found = load("bare", "alpha")
    assert (found["bare"].fault, found["bare"].version) == (None, "")
    assert found["alpha"].fault is None


def test_an_unreadable_list_of_entry_points_costs_only_its_own_distribution(site):
    site.add("alpha")
    site.add("mangled", points="mangled without an equals sign")
    with pytest.warns(UserWarning, match="the entry points of mangled-dist are damaged") as caught:
        names = {point.name for point in entry_points()}
    assert "pip install --force-reinstall mangled-dist" in str(caught[0].message)
    assert "alpha" in names
    assert "mangled" not in names


def test_the_order_of_installation_changes_nothing(site, tmp_path, monkeypatch):
    def described(order):
        folder = Site(tmp_path / "-".join(order))
        folder.folder.mkdir()
        for name in order:
            folder.add(name, "raise OSError('gone')" if name == "broken" else None)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder.folder))
            return [(each.name, each.source, each.usable, each.fault and each.fault.what) for each in discover(order)]

    first, *others = [described(order) for order in itertools.permutations(("alpha", "broken", "zeta"))]
    assert [name for name, *_ in first] == ["alpha", "broken", "zeta"]
    assert all(other == first for other in others)


def test_a_plugin_that_hangs_is_named_and_left_behind(site, monkeypatch, capsys):
    monkeypatch.setattr(plugins, "HANG_SECONDS", 0.2)
    site.add("asleep", "import time; time.sleep(60)")
    busy = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end:\n    pass"
    site.add("busy", busy)
    site.add("quick")
    found = load("asleep", "busy", "quick")
    told = capsys.readouterr().err
    for name in ("asleep", "busy"):
        assert found[name].fault.what == "it has not finished loading after 0.2 s"
        assert f"HEADSTOCK_PLUGINS=-{name}" in found[name].fault.cure
        assert f"{name!r} ({name}-dist): it has not finished" in told
    assert found["quick"].fault is None
    assert "quick" not in told


def test_a_plugin_may_be_slow_to_the_limit_of_patience(site, monkeypatch):
    monkeypatch.setattr(plugins, "HANG_SECONDS", 30)
    site.add("slow", "import time; time.sleep(0.1)\n" + OFFER.replace("NAME", "slow"))
    assert load("slow")["slow"].fault is None


def test_plugins_are_found_from_any_thread(site):
    site.add("alpha")
    site.add("broken", "raise OSError('gone')")
    with ThreadPoolExecutor() as pool:
        found = {each.name: each.usable for each in pool.submit(discover, ["alpha", "broken"]).result()}
    assert found == {"alpha": True, "broken": False}


def test_what_a_process_or_c_code_of_a_plugin_prints_does_not_reach_standard_output(site):
    prints = "os.system('echo from a process'); os.write(1, b'from a descriptor'); ctypes.CDLL(None).puts(b'from C')"
    held_back = "print('from the stream beneath', file=sys.__stdout__)"
    site.add("shell", f"import ctypes, os, sys; {prints}; {held_back}\n" + OFFER)
    code = "from headstock import discover; print([each.name for each in discover()])"
    done = site.run(code, HEADSTOCK_PLUGINS="shell", PYTHONUNBUFFERED="")  # which would have C hold nothing back
    assert done.stdout == "['name']\n"
    for printed in ("from a process", "from a descriptor", "from C", "from the stream beneath"):
        assert printed in done.stderr


def test_standard_output_is_as_it_was_once_no_thread_keeps_it_apart(capfd):
    print("before")
    with ExitStack() as first, ExitStack() as last:
        first.enter_context(stdout_to_stderr())
        last.enter_context(stdout_to_stderr())  # in another thread, these do not end in the opposite order
        first.close()
        print("within")
        os.system("echo a process within")
        last.close()
        print("after")
        os.system("echo a process after")
    out, err = capfd.readouterr()
    assert out.splitlines() == ["before", "after", "a process after"]
    assert err.splitlines() == ["within", "a process within"]


def test_candidates_know_their_plugin_and_do_not_tell_it_in_documents(site):
    site.add("alpha")
    site.add("broken", "raise OSError('gone')")
    for candidate in discover(["alpha", "broken"]):
        assert candidate.plugin.name == candidate.name
        assert "plugin" not in candidate.model_dump()
        assert candidate.failed(Fault(what="late")).plugin is candidate.plugin
