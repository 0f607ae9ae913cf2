"""The members in lock step: one version, one licence, one Python, one way to build."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import headstock

ROOT = Path(__file__).parents[1]


def test_every_member_has_the_version_of_the_host(members):
    assert {member.name: member.project["version"] for member in members} == {
        member.name: headstock.__version__ for member in members
    }
    assert metadata.version("headstock") == headstock.__version__


def test_members_agree_on_python_licence_and_build_backend(members):
    host, *plugins = members
    for plugin in plugins:
        assert plugin.pyproject["build-system"] == host.pyproject["build-system"]
        for key in ("requires-python", "license"):
            assert plugin.project[key] == host.project[key]
    assert host.pyproject["build-system"]["build-backend"] == "hatchling.build"


def test_every_member_carries_the_licence_of_the_repository(members):
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    for member in members:
        assert (member.folder / "LICENSE").read_text(encoding="utf-8") == licence, member.name


def test_a_plugin_is_named_after_its_folder(members):
    for plugin in members[1:]:
        name = plugin.folder.name
        assert plugin.name == f"headstock-{name.replace('_', '-')}"
        assert plugin.project["entry-points"]["headstock"] == {name.replace("_", "-"): f"headstock_{name}"}


def test_a_plugin_requires_exactly_its_host_and_an_extra_of_the_host_exactly_the_plugin(members):
    host, *plugins = members
    extras = host.project["optional-dependencies"]
    of_plugins = {name: needs for name, needs in extras.items() if any(need.startswith("headstock") for need in needs)}
    assert of_plugins == {
        plugin.name.removeprefix("headstock-"): [f"{plugin.name}=={headstock.__version__}"] for plugin in plugins
    }
    for plugin in plugins:
        needed = [need for need in plugin.project["dependencies"] if need.startswith("headstock")]
        assert needed == [f"headstock=={headstock.__version__}"]


def test_uv_takes_every_member_from_the_workspace(members):
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    assert uv["sources"] == {member.name: {"workspace": True} for member in members}
    listed = {folder for pattern in uv["workspace"]["members"] for folder in ROOT.glob(pattern)}
    assert {member.folder for member in members} <= listed
