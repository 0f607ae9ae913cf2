"""What the workspace's tests share: its members, wheels of them, fresh environments to install in, a small model."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None)  # a busy machine fails no test
settings.load_profile("patient")

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Member:
    """A distribution of this workspace: its folder and what its pyproject.toml says."""

    folder: Path
    pyproject: dict[str, Any]

    @property
    def project(self) -> dict[str, Any]:
        return self.pyproject["project"]

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def package(self) -> Path:
        """The folder of its import package."""
        return self.folder / "src" / self.name.replace("-", "_")


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own. It may use the packages of the running one, but nothing of this workspace."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: object) -> str:
        """Runs the pip of these tests on this environment, without the package index; what it prints."""
        return run(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=self.folder).stdout

    def run(
        self, program: str, *arguments: object, code: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program installed here, outside the checkout, and expects it to exit with `code`."""
        return run(self.folder / "bin" / program, *arguments, cwd=self.folder, code=code, **variables)


def run(*command: object, cwd: Path, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command and expects the exit `code`; of what changes imports and discovery, only `variables` are set."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HEADSTOCK_PLUGINS")}
    env |= variables
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == code, f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="session")
def members() -> list[Member]:
    """Every member of the workspace, the host first."""
    files = [ROOT / "core" / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    return [Member(file.parent, tomllib.loads(file.read_text(encoding="utf-8"))) for file in files]


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """Builds a wheel of each folder given, and returns them in that order."""

    def build(*folders: Path) -> list[Path]:
        wheels = []
        for folder in folders:
            out = tmp_path_factory.mktemp("wheel")
            run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, folder, cwd=out)
            wheels += out.iterdir()
        return wheels

    return build


@pytest.fixture(scope="session", name="run")
def _run():
    """`run`, for tests, which cannot import this file."""
    return run


@pytest.fixture(scope="session")
def wheels(build, members) -> list[Path]:
    """A wheel of every member, in the order of `members`."""
    return build(*(member.folder for member in members))


@pytest.fixture(scope="session")
def borrowed(tmp_path_factory) -> Path:
    """A folder of links to the packages of the running environment but the workspace's own: torch is large.

    What makes an editable install work, a .pth file, has no effect in a folder that is only on the path.
    """
    folder = tmp_path_factory.mktemp("borrowed")
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(place).iterdir():
            if "headstock" not in entry.name:
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory, borrowed):
    """Makes fresh environments, which find what is installed in them before what is borrowed."""

    def environment() -> Environment:
        made = Environment(tmp_path_factory.mktemp("environment"))
        venv.create(made.folder, symlinks=True)
        places = {"base": str(made.folder), "platbase": str(made.folder)}
        site = Path(sysconfig.get_path("purelib", "venv", places))
        (site / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
        return made

    return environment


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A model folder as transformers writes it: random weights, float32, and a tokenizer of 256 letters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    letters = {chr(0x4E00 + code): code for code in range(256)}  # one each, so that equal text means equal tokens
    tokenizer = Tokenizer(models.BPE(letters, [], unk_token=chr(0x4E00)))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
