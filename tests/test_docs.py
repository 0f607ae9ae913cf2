"""What the documentation shows is run as it stands: Python by file, in one namespace; shell block by block."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FILES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("core/*.md"), *ROOT.glob("plugins/*/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: \S.* -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block: its file, the line it starts at, its language, and whether a comment before it opts out."""

    file: Path
    line: int
    language: str
    text: str
    runs: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def blocks_of(file: Path) -> list[Block]:
    text = file.read_text(encoding="utf-8")
    return [
        Block(
            file,
            text.count("\n", 0, match.start(2)) + 1,
            match[1],
            match[2],
            NOT_RUN.search(text, 0, match.start()) is None,
        )
        for match in FENCE.finditer(text)
    ]


BLOCKS = [block for file in FILES for block in blocks_of(file)]
PYTHON = {file: [b for b in BLOCKS if b.file == file and b.language == "python" and b.runs] for file in FILES}
SHELL = [block for block in BLOCKS if block.language in ("bash", "console") and block.runs]


def run(command: list[str], folder: Path) -> None:
    """Runs what a reader would, with this environment's programs found first."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTOCK_")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", [file for file in FILES if PYTHON[file]], ids=lambda file: file.name)
def test_python_runs(file, tmp_path):
    script = tmp_path / file.with_suffix(".py").name
    code = ""
    for block in PYTHON[file]:  # each at its own line, so that a traceback points into the document
        code += "\n" * (block.line - 1 - code.count("\n")) + block.text
    script.write_text(code, encoding="utf-8")
    run([sys.executable, str(script)], tmp_path)


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


@pytest.mark.parametrize("block", SHELL, ids=str)
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


def test_what_is_not_run_is_counted():
    """A block that opts out, by `<!-- not run: the reason -->` right before it, raises this number on purpose."""
    assert [str(block) for block in BLOCKS if not block.runs] == []
    assert any(PYTHON.values())
    assert SHELL
