"""`headstock new`: what it writes and what it refuses. The backend it writes is compared with the reference here."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib

import pytest

import headstock
from headstock.cli.main import main
from headstock.cli.new import FILES, new
from headstock.errors import HeadstockError
from headstock.testing.problem import make_problem


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No plugin is installed that could claim a name, and nothing lies here."""
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def lathe(tmp_path_factory):
    """A package called `three-jaw.Lathe`."""
    folder = tmp_path_factory.mktemp("new") / "made"
    new("three-jaw.Lathe", folder)
    return folder


def test_every_file_is_there_and_nothing_is_left_to_fill_in(lathe):
    made = {file.relative_to(lathe).as_posix(): file.read_text() for file in lathe.rglob("*") if file.is_file()}
    assert made.keys() == {target.replace("$module", "three_jaw_lathe") for target in FILES}
    assert not [name for name, text in made.items() if "$" in text]
    for name, text in made.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


def test_the_package_names_itself_its_entry_point_and_this_host(lathe):
    pyproject = tomllib.loads((lathe / "pyproject.toml").read_text())
    assert pyproject["project"]["name"] == "three-jaw-lathe"
    assert pyproject["project"]["entry-points"]["headstock"] == {"three-jaw-lathe": "three_jaw_lathe"}
    assert f"headstock>={headstock.__version__}" in pyproject["project"]["dependencies"]
    assert any(need.startswith("pytest") for need in pyproject["dependency-groups"]["test"])


def test_the_manifest_is_light_and_its_offer_is_whole(lathe):
    code = "import sys, three_jaw_lathe as m; [offer] = m.attention_backends(); print(offer.name, offer.backend, "
    code += "*{'torch', 'rich', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=lathe / "src", capture_output=True, text=True)
    assert done.stdout.split() == ["three-jaw-lathe", "three_jaw_lathe.backend:ThreeJawLathe"], done.stderr


@pytest.fixture(scope="module")
def backend(lathe):
    sys.path.insert(0, str(lathe / "src"))
    yield importlib.import_module("three_jaw_lathe.backend").ThreeJawLathe
    sys.path.remove(str(lathe / "src"))
    for name in ("three_jaw_lathe", "three_jaw_lathe.backend"):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"page_size": 1, "kv_layout": "hnd"},
        {"num_heads": 14, "num_kv_heads": 2, "head_dim": 80},
        {"dtype": "bfloat16", "page_size": 3},
        {"dtype": "float16"},
        {"padded_rows": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1, 1, 1], [1, 9, 4]), ([4, 1, 3], [4, 9, 8])])
def test_the_backend_is_right(backend, query_lens, seq_lens, fields):
    make_problem(query_lens, seq_lens, lse=True, **fields).check(backend)


def test_the_next_steps_are_told(capsys):
    new("lathe-two")
    first, *then = capsys.readouterr().out.splitlines()
    assert "lathe-two" in first
    assert [line.split()[0] for line in then] == ["cd", "python", "headstock"]


def test_an_empty_folder_will_do_and_a_full_one_is_left_alone(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    new("lathe-two", folder)
    before = {file: file.read_text() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(HeadstockError, match="not empty"):
        new("lathe-three", folder)
    assert {file: file.read_text() for file in folder.rglob("*") if file.is_file()} == before


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "lathe-two").write_text("mine")
    with pytest.raises(HeadstockError, match=r"a file where the folder would be; given: lathe-two"):
        new("lathe-two")
    with pytest.raises(HeadstockError, match="cannot write "):
        new("lathe-two", tmp_path / "lathe-two" / "below")


@pytest.mark.parametrize("name", ["", "-lathe", "lathe.", "a lathe", "läthe", "lathe/../..", "lathe\n", "$name"])
def test_a_name_must_be_one_that_can_be_published(name, tmp_path):
    with pytest.raises(HeadstockError, match="cannot be the name of a package"):
        new(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [("3d", "cannot import"), ("class", "cannot import"), ("none", "cannot import"), ("json", "Python's own"),
     ("HeadStock", "is installed"), ("PyTest", "is installed")],
)  # fmt: skip
def test_a_name_must_be_free(name, why, tmp_path):
    with pytest.raises(HeadstockError, match=why) as refusal:
        new(name)
    assert "would work: " in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_on_the_command_line_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["headstock", "new", "json"])
    with pytest.raises(SystemExit) as end:
        main()
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.startswith("headstock: ")
    assert error.count("\n") == 1
