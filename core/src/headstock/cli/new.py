"""`headstock new`: a plugin package that installs, is listed and passes the conformance suite, to start from."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

import typer

import headstock
from headstock.errors import HeadstockError
from headstock.offer import canonical
from headstock.plugins import installed

FILES = {
    "pyproject.toml": "pyproject.toml.tmpl",
    "README.md": "README.md.tmpl",
    "src/$module/__init__.py": "manifest.py.tmpl",
    "src/$module/backend.py": "backend.py.tmpl",
    "tests/test_conformance.py": "test_conformance.py.tmpl",
    ".github/workflows/test.yml": "test.yml.tmpl",
    ".gitignore": "gitignore.tmpl",
}
"""The files of a new package, each with its template in `headstock/templates`."""

PEP_508_NAME = re.compile(r"[A-Z0-9]([A-Z0-9._-]*[A-Z0-9])?", re.IGNORECASE | re.ASCII)

NewName = Annotated[str, typer.Argument(metavar="NAME", help="of the distribution, the plugin and its backend")]
Folder = Annotated[Path | None, typer.Option("--path", metavar="DIR", help="the folder to make [default: NAME, here]")]


def new(name: NewName, path: Folder = None) -> None:
    """Makes a package with a backend of your own, which passes `headstock check` as it is."""
    if not PEP_508_NAME.fullmatch(name):
        works = "letters, digits, '-', '_' and '.', the first and last a letter or digit"
        raise HeadstockError("this cannot be the name of a package", given=repr(name), works=works)
    name = canonical(name)
    folder = path or Path(name)
    _check_free(name, _module(name), folder)
    _write(name, folder)
    print(f"{name}: a package of {len(FILES)} files in {folder}; next:")
    print(f"  cd {shlex.quote(str(folder))}")
    print("  python -m pip install -e . --group test")
    print(f"  headstock check {name} --quick")


def _module(name: str) -> str:
    """The import package of a distribution: `my-backend` is imported as `my_backend`."""
    return name.replace("-", "_")


def _class_name(name: str) -> str:
    """The class of a backend: `my-backend` is a `MyBackend`."""
    return "".join(word.capitalize() for word in name.split("-"))


def _check_free(name: str, module: str, folder: Path) -> None:
    """Refuses a name that Python cannot import or that hides something, and a folder that holds something."""
    if not module.isidentifier() or keyword.iskeyword(module) or keyword.iskeyword(_class_name(name)):
        raise HeadstockError("Python cannot import a package of this name", given=module, works=f"attention-{name}")
    if module in sys.stdlib_module_names:
        raise HeadstockError(
            "a package of this name would hide a module of Python's own", given=module, works=f"{name}-attention"
        )
    for plugin in installed():
        if canonical(plugin.name) == name or any(each.answers_to(name) for each in plugin.candidates()):
            source = f"{plugin.distribution} {plugin.version}".strip()
            raise HeadstockError(
                "a plugin of this name is installed, and two of one name are both refused",
                given=f"{name}, which {source} brings",
                works="another name",
            )
    if found := find_spec(module):
        where = found.origin or next(iter(found.submodule_search_locations or ()), "")
        raise HeadstockError(
            "a package of this name would hide one that is installed", given=f"{module}, {where}", works="another name"
        )
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        what = "the folder is not empty" if folder.is_dir() else "there is a file where the folder would be"
        raise HeadstockError(what, given=folder, works="--path with a new or empty folder")


def _write(name: str, folder: Path) -> None:
    templates = files(headstock) / "templates"
    values = {
        "name": name,
        "module": _module(name),
        "class_name": _class_name(name),
        "version": headstock.__version__,
    }
    try:
        for target, template in FILES.items():
            file = folder / Template(target).substitute(values)
            file.parent.mkdir(parents=True, exist_ok=True)
            text = (templates / template).read_text(encoding="utf-8")
            file.write_text(Template(text).substitute(values), encoding="utf-8")
    except OSError as error:
        raise HeadstockError(
            f"cannot write to {folder}: {error.strerror}", works="--path with another folder"
        ) from None
