"""What may know of what: plugins of the public API alone, the host of no plugin, light modules of nothing heavy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import headstock

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src"
SOURCES = [*CORE.rglob("*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
PLUGIN_SOURCES = sorted(ROOT.glob("plugins/*/src/**/*.py"))
PLUGIN_TESTS = sorted(ROOT.glob("plugins/*/tests/**/*.py"))
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
HEAVY = {"torch", "transformers", "rich"}
LIGHT = {
    "capabilities", "offer", "requirement", "negotiate", "decision", "hookspecs", "plugins", "errors", "models.config",
}  # fmt: skip


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def where(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def imports(nodes: Iterator[ast.AST]) -> Iterator[tuple[ast.AST, str, str | None]]:
    """(node, module, name) of every import; no name for `import module`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node, node.module, alias.name) for alias in node.names)


# Plugins see the public API


def not_public(file: Path, *subpackages: str) -> list[str]:
    """The imports of the host in `file` that are neither names of the public API nor from these `subpackages`."""
    return [
        f"{where(file, node)}: {module} {name or ''}"
        for node, module, name in imports(ast.walk(tree(file)))
        if module.split(".")[0] == "headstock"
        and not (module == "headstock" and (name is None or name in headstock.__all__))
        and not f"{module}.".startswith(tuple(f"{package}." for package in subpackages))
    ]


def test_plugins_import_only_the_public_api():
    assert PLUGIN_SOURCES
    assert [found for file in PLUGIN_SOURCES for found in not_public(file)] == []


def test_the_tests_of_plugins_may_import_the_suite_too():
    assert [found for file in PLUGIN_TESTS for found in not_public(file, "headstock.testing")] == []


# The host knows no plugin


def spellings(members) -> re.Pattern[str]:
    """Every way to write the name of a plugin: its words apart by `-`, `_`, `.`, a space or nothing, in any case."""
    names = {name for member in members[1:] for name in member.project["entry-points"]["headstock"]}
    names |= {member.folder.name for member in members[1:]}
    words = {"[-_. ]?".join(re.split("[-_]", name)) for name in names}
    return re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(words))})(?![a-z0-9])", re.IGNORECASE)


def test_no_code_of_the_host_names_a_plugin(members):
    """Names and strings may not; a docstring may credit the library that a definition is borrowed from.

    A compiler that a module imports may have the name of a plugin that is written in it.
    """
    plugin = spellings(members)
    assert plugin.search("TorchNative") is not None  # the pattern works
    found = []
    for file in CORE.rglob("*.py"):
        module = tree(file)
        prose = {node.value for node in ast.walk(module) if isinstance(node, ast.Expr)}
        imported = {alias.name for node in ast.walk(module) if isinstance(node, ast.Import) for alias in node.names}
        for node in set(ast.walk(module)) - prose:
            words = [value for _, value in ast.iter_fields(node) if isinstance(value, str) and value not in imported]
            found += [f"{where(file, node)}: {word}" for word in words if plugin.search(word)]
    assert found == []


def test_no_text_of_the_host_names_the_package_of_a_plugin(members):
    packages = re.compile("|".join(member.name.replace("-", "[-_.]") for member in members[1:]), re.IGNORECASE)
    for file in CORE.rglob("*.py"):
        assert not packages.search(file.read_text(encoding="utf-8")), file


# What is light stays light, and nothing goes in circles


def test_light_modules_import_nothing_heavy():
    commands = [f"cli.{file.stem}" for file in sorted((CORE / "headstock" / "cli").glob("[!_]*.py"))]
    modules = ["headstock", *(f"headstock.{name}" for name in (*LIGHT, *commands))]
    script = f"import sys, {', '.join(modules)}; print(*{HEAVY!r}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below `node` that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTION | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from at_import(child)


def test_no_module_imports_itself_by_way_of_others():
    files = {
        ".".join(file.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__"): file
        for file in CORE.rglob("*.py")
    }
    graph = {
        name: {
            target
            for _, module, imported in imports(at_import(tree(file)))
            for target in (f"{module}.{imported}" if f"{module}.{imported}" in files else module,)
            if target in files
        }
        for name, file in files.items()
    }
    assert graph["headstock.negotiate"]  # the imports were found
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


# The environment of the process belongs to the user

CHANGES = {"update", "setdefault", "pop", "popitem", "clear"}
ENVIRON = re.compile(r"(os\.)?environb?")


def writes_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript | ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return bool(ENVIRON.fullmatch(ast.unparse(node.value if isinstance(node, ast.Subscript) else node)))
    if not isinstance(node, ast.Call):
        return False
    called, _, method = ast.unparse(node.func).rpartition(".")
    return method in ("putenv", "unsetenv") or (method in CHANGES and bool(ENVIRON.fullmatch(called)))


@pytest.mark.parametrize(
    "code",
    [
        "os.environ['A'] = 'b'",
        "del environ['A']",
        "os.environ.update(a='b')",
        "os.environ |= {}",
        "os.putenv('A', 'b')",
    ],
)
def test_a_write_to_the_environment_is_noticed(code):
    assert any(writes_environment(node) for node in ast.walk(ast.parse(code)))


def test_no_source_writes_an_environment_variable():
    assert [where(file, node) for file in SOURCES for node in ast.walk(tree(file)) if writes_environment(node)] == []


# Files are found by path, never by the package that a folder seems to be


def test_tests_are_no_packages_and_their_file_names_are_unique():
    folders = [ROOT / "tests", ROOT / "core" / "tests", *ROOT.glob("plugins/*/tests")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert [file for file in files if file.name == "__init__.py"] == []
    counts = Counter(file.name for file in files if file.name != "conftest.py")
    assert [name for name, count in counts.items() if count > 1] == []


def test_only_src_holds_packages_of_plugins():
    assert [f for f in ROOT.glob("plugins/**/__init__.py") if f.relative_to(ROOT).parts[2] != "src"] == []


# The public API is documented where it is defined


def public_api() -> dict[str, str]:
    """Name → the module that defines it, as type checkers are told."""
    found = imports(ast.walk(tree(CORE / "headstock" / "__init__.py")))
    return {name: home for _, home, name in found if name and home.startswith("headstock.")}


def documented(module: ast.Module, name: str) -> bool:
    """Whether `name` has a docstring, or is a value with one below its assignment."""
    for node, following in zip(module.body, [*module.body[1:], None], strict=True):
        if isinstance(node, FUNCTION | ast.ClassDef) and node.name == name:
            return bool(ast.get_docstring(node))
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in ast.unparse(node).partition("=")[0]:
            return isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
    return False


def test_type_checkers_and_python_are_told_the_same_names():
    assert sorted(public_api()) == sorted(headstock.__all__)


@pytest.mark.parametrize("first", ["import headstock", "import {}"], ids=["package first", "modules first"])
def test_a_public_name_is_what_its_module_defines_whatever_is_imported_first(first):
    """A function and its module may share a name, and importing a module binds it in its package."""
    homes = public_api()
    check = "assert getattr(headstock, name) is getattr(sys.modules[home], name), name"
    script = f"{first.format(', '.join(homes.values()))}\nimport sys\nfor name, home in {homes}.items(): {check}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_has_a_docstring():
    homes = {name: tree((CORE / home.replace(".", "/")).with_suffix(".py")) for name, home in public_api().items()}
    assert [name for name, module in homes.items() if not documented(module, name)] == []
    methods = [
        f"{name}.{node.name}"
        for name, module in homes.items()
        for definition in module.body
        if isinstance(definition, ast.ClassDef) and definition.name == name
        for node in definition.body
        if isinstance(node, FUNCTION) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert methods == []
