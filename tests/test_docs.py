"""What the documentation shows is run as it stands: Python by file, in one namespace; shell block by block.

A block that follows its path alone, as in `src/lathe.py`:, is a file. A document with files is a story, told in one
folder and one fresh environment from its first block to its last.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from headstock import AttentionBackend, AttentionLayer, BackendSpec, ForwardBatch, hookspecs
from headstock.capabilities import AXES, Capabilities

ROOT = Path(__file__).parents[1]
FILES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("core/*.md"), *ROOT.glob("plugins/*/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: \S.* -->\s*\Z")
NAMED = re.compile(r"^`(\S+)`:\s*\Z", re.MULTILINE)
GUIDE = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    """A fenced block: its document, the line it starts at, its language, and whether a comment before it opts out.

    `path` is where a reader puts it, None where it is no file.
    """

    file: Path
    line: int
    language: str
    text: str
    runs: bool
    path: str | None

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def blocks_of(file: Path) -> list[Block]:
    text, blocks = file.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        before, line = text[: match.start()], text.count("\n", 0, match.start(2)) + 1
        named = NAMED.search(before)
        blocks.append(Block(file, line, match[1], match[2], not NOT_RUN.search(before), named[1] if named else None))
    return blocks


BLOCKS = [block for file in FILES for block in blocks_of(file)]
RUN = [block for block in BLOCKS if block.runs]
PYTHON = {file: [b for b in RUN if b.file == file and b.language == "python" and not b.path] for file in FILES}
STORIES = sorted({block.file for block in RUN if block.path})
SHELL = [block for block in RUN if block.language in ("bash", "console")]


def run(command: list[str], folder: Path, programs: Path = Path(sys.executable).parent) -> None:
    """Runs what a reader would, with the environment's programs found first: this one's, or those given."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTOCK_")}
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def python_of(file: Path, folder: Path) -> Path:
    """A document's Python as a script, each block at its own line, so that a traceback points into the document."""
    script, code = folder / file.with_suffix(".py").name, ""
    for block in PYTHON[file]:
        code += "\n" * (block.line - 1 - code.count("\n")) + block.text
    script.write_text(code, encoding="utf-8")
    return script


@pytest.mark.parametrize("file", [f for f in FILES if PYTHON[f] and f not in STORIES], ids=lambda file: file.name)
def test_python_runs(file, tmp_path):
    run([sys.executable, str(python_of(file, tmp_path))], tmp_path)


def commands(block: Block) -> list[str]:
    """The lines that a reader would type; in a `console` block those after a prompt, the rest is output."""
    lines = block.text.splitlines()
    return [line[2:] for line in lines if line.startswith("$ ")] if block.language == "console" else lines


def check_make(arguments: list[str]) -> None:
    """The targets exist."""
    run(["make", "--dry-run", *arguments], ROOT)


def check_pip_install(arguments: list[str], members) -> None:
    """What is named is a member, with extras that it has, or something that a member depends on."""
    extras = {member.name: member.project.get("optional-dependencies", {}) for member in members}
    needs = [need for member in members for need in member.project["dependencies"]]
    needs += [need for of_member in extras.values() for group in of_member.values() for need in group]
    for requirement in (Requirement(argument) for argument in arguments if not argument.startswith("-")):
        assert requirement.name in {*extras, *(Requirement(need).name for need in needs)}
        assert requirement.extras <= extras.get(requirement.name, {}).keys()


@pytest.mark.parametrize("block", [block for block in SHELL if block.file not in STORIES], ids=str)
def test_shell_runs(block, members, tmp_path):
    """What sets up a machine is checked instead: these tests run where it was done."""
    script = []
    for line in commands(block):
        if line.startswith("make "):
            check_make(shlex.split(line, comments=True)[1:])
        elif line.startswith("pip install "):
            check_pip_install(shlex.split(line, comments=True)[2:], members)
        else:
            script.append(line)
    run(["bash", "-euo", "pipefail", "-c", "\n".join(script)], tmp_path)


def without_index(line: str) -> str:
    """A command that installs, for an environment that has what the package needs and no access to the index."""
    here = "python -m pip install --no-index --no-deps --no-build-isolation"
    return re.sub(r"^python -m pip install -e (\S+) --group \w+$", rf"{here} \1", line)


@pytest.mark.slow
@pytest.mark.parametrize("file", STORIES, ids=lambda file: file.name)
def test_a_story_runs_from_its_first_block_to_its_last(file, environment, wheels, tmp_path):
    """A file that is there already must be as shown; the shell's folder lasts; Python that is no file comes last."""
    site, folder, place = environment(), tmp_path / "empty", tmp_path / "place"
    site.pip("install", "--no-index", "--no-deps", *wheels)
    folder.mkdir()
    for block in [block for block in RUN if block.file == file]:
        if block.path:
            target = folder / block.path
            assert not target.exists() or target.read_text(encoding="utf-8") == block.text, str(block)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        elif block in SHELL:
            script = "\n".join([*map(without_index, commands(block)), f"pwd > {shlex.quote(str(place))}"])
            run(["bash", "-euo", "pipefail", "-c", script], folder, site.python.parent)
            folder = Path(place.read_text(encoding="utf-8").strip())
    run([str(site.python), str(python_of(file, tmp_path))], folder, site.python.parent)


# The guide for authors is complete


def call(function: Callable[..., object]) -> str:
    """How a hook is called, by name: "forward(q, k, out=)"."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    arguments = [f"{each.name}=" if each.kind is each.KEYWORD_ONLY else each.name for each in parameters]
    return f"{function.__name__}({', '.join(arguments)})"


def test_the_guide_has_every_hook_with_its_arguments():
    hooks = [value for value in vars(hookspecs).values() if hasattr(value, "headstock_spec")]
    hooks += [getattr(AttentionBackend, name) for name in vars(AttentionBackend) if not name.startswith("_")]
    assert len(hooks) > 10
    assert [each for each in map(call, hooks) if f"| `{each}` |" not in GUIDE] == []


def undeclared(name: str) -> str:
    """What a record means that leaves an axis out."""
    field = Capabilities.model_fields[name]
    if AXES[name].kind == "domain":
        return "required" if field.is_required() else "required with paged or mla"
    if AXES[name].kind == "coupled":
        return '"same"'
    return "off" if field.default is False else str(field.default) if field.default else "none"


def test_the_guide_has_every_axis_as_it_is():
    head = "| axis | kind | if not declared | what it says |\n|---|---|---|---|\n"
    table = GUIDE.split(head)[1].split("\n\n")[0].splitlines()
    rows = [f"| `{name}` | {axis.kind} | {undeclared(name)} | {axis.doc} |" for name, axis in AXES.items()]
    assert table == rows


@pytest.mark.parametrize("record", [ForwardBatch, BackendSpec, AttentionLayer])
def test_the_guide_has_every_field(record):
    names = [field.name for field in fields(record) if not field.name.startswith("_")]
    assert [name for name in names if f"`{name}`" not in GUIDE] == []


def test_what_is_not_run_is_counted():
    """A block that opts out, by `<!-- not run: the reason -->` right before it, raises this number on purpose."""
    assert [str(block) for block in BLOCKS if not block.runs] == []
    assert any(PYTHON.values())
    assert SHELL
