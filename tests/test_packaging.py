"""Wheels of every member: what is in them, and that they install and run without the checkout; and uv's lock."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(environment, wheels):
    """An environment with the wheels of all members."""
    made = environment()
    made.pip("install", "--no-index", "--no-deps", *wheels)
    return made


def test_a_wheel_holds_the_whole_package_its_types_and_its_licence_and_nothing_else(members, wheels):
    for member, wheel in zip(members, wheels, strict=True):
        names = ZipFile(wheel).namelist()
        sources = {
            file.relative_to(member.package.parent).as_posix()
            for file in member.package.rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        }
        assert {name for name in names if ".dist-info/" not in name} == sources
        assert f"{member.package.name}/py.typed" in names
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_an_extra_of_the_host_brings_the_plugin_with_it(environment, wheels, tmp_path):
    for wheel in wheels:
        shutil.copy(wheel, tmp_path)
    report = environment().pip(
        "install", "--no-index", "--find-links", tmp_path, "--dry-run", "--quiet", "--report", "-",
        "headstock[torch-native]",
    )  # fmt: skip
    names = {item["metadata"]["name"] for item in json.loads(report)["install"]}
    assert names == {"headstock", "headstock-torch-native"}


def test_installed_packages_come_from_the_wheels(installed, members):
    modules = [member.package.name for member in members]
    script = f"import json, sys, {', '.join(modules)}; print(json.dumps([m.__file__ for m in ({', '.join(modules)},)]))"
    for file in json.loads(installed.run("python", "-c", script).stdout):
        assert Path(file).is_relative_to(installed.folder)
    path = installed.run("python", "-c", "import sys; print(*sys.path, *sys.meta_path)").stdout
    assert str(ROOT / "core") not in path
    assert str(ROOT / "plugins") not in path


def test_plugins_are_found_and_whole(installed, members):
    listed = json.loads(installed.run("headstock", "plugins", "--json").stdout)["plugins"]
    assert [plugin["distribution"] for plugin in listed] == sorted(member.name for member in members[1:])
    native = next(plugin for plugin in listed if plugin["name"] == "torch-native")
    assert native["status"] == "ok"
    assert native["backends"] == ["torch-native"]


def test_backends_and_explain_tell_what_can_run(installed, tiny_model):
    backends = json.loads(installed.run("headstock", "backends", "--json").stdout)["backends"]
    assert "torch-native" in [backend["name"] for backend in backends]
    asked = ("headstock", "explain", "--device", "cpu", "--model", tiny_model)
    decision = json.loads(installed.run(*asked, "--json").stdout)
    assert [choice["requirement"]["role"] for choice in decision["choices"]] == ["extend", "decode"]
    assert "torch-native" in installed.run(*asked).stdout


def test_text_is_generated(installed, tiny_model):
    asked = ("--raw", "--device", "cpu", "--model", tiny_model, "--max-tokens", 12)
    done = installed.run("headstock", "generate", "丁万丈", *asked)
    assert len(done.stdout.strip()) == 12
    assert "torch-native" in done.stderr
    assert "tokens/s" in done.stderr


@pytest.mark.network
def test_uv_locks_the_workspace(members, tmp_path):
    """Nothing is downloaded but metadata; the lock stays uncommitted, as it would hold an index's addresses."""
    for file in (ROOT / "pyproject.toml", *(member.folder / "pyproject.toml" for member in members)):
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    command = [Path(sys.executable).with_name("uv"), "lock", "--no-build", "--python", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    locked = tomllib.loads((tmp_path / "uv.lock").read_text(encoding="utf-8"))
    sources = {package["name"]: package["source"] for package in locked["package"]}
    assert {name: source.get("editable") for name, source in sources.items() if name.startswith("headstock")} == {
        member.name: member.folder.relative_to(ROOT).as_posix() for member in members
    }
    assert "torch" in sources
    assert "llama-cpp-python" not in sources
