"""`headstock new`, as an author meets it: the package is made, installed and listed, and passes the suite."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def site(environment, wheels, build):
    """An environment with the workspace's wheels, where `my-backend` was made and installed."""
    made = environment()
    made.pip("install", "--no-index", "--no-deps", *wheels)
    said = made.run("headstock", "new", "my-backend").stdout
    assert [line.strip() for line in said.splitlines()[1:]] == [
        "cd my-backend",
        "python -m pip install -e . --group test",
        "headstock check my-backend --quick",
    ]
    [wheel] = build(made.folder / "my-backend")
    made.pip("install", "--no-index", "--no-deps", wheel)
    return made


def test_it_is_listed(site):
    plugins = json.loads(site.run("headstock", "plugins", "--json").stdout)["plugins"]
    [listed] = [plugin for plugin in plugins if plugin["name"] == "my-backend"]
    assert (listed["status"], listed["distribution"], listed["backends"]) == ("ok", "my-backend", ["my-backend"])


@pytest.mark.slow
def test_it_passes_the_conformance_suite(site):
    report = json.loads(site.run("headstock", "check", "my-backend", "--quick", "--json").stdout)
    assert report["passed"]
    assert len(report["cases"]) > 50


@pytest.mark.slow
def test_its_own_tests_pass(site):
    said = site.run("python", "-m", "pytest", site.folder / "my-backend", "-p", "no:cacheprovider").stdout
    assert " passed" in said
    assert "failed" not in said


def test_it_serves_only_those_who_ask_for_it(site, tiny_model):
    asked = ("headstock", "explain", "--json", "--device", "cpu", "--model", tiny_model)
    for choice, backend in ((), "torch-native"), (("--attention-backend", "my-backend"), "my-backend"):
        decision = json.loads(site.run(*asked, *choice).stdout)
        assert {winner["backend"] for each in decision["choices"] for winner in each["winners"]} == {backend}


def test_a_second_backend_of_its_name_is_refused(site):
    for name in "my-backend", "My_Backend":
        refusal = site.run("headstock", "new", name, "--path", "another", code=2).stderr
        assert refusal.startswith("headstock: ")
        assert "my-backend 0.1.0" in refusal
    assert not (site.folder / "another").exists()
