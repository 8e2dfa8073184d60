"""The package's own source, read as syntax trees; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["ROOT", "Import", "Module", "all_modules", "ipu_modules", "modules"]

ROOT = Path(__file__).resolve().parent.parent.parent
SRC = ROOT / "src"
IPU_SRC = ROOT / "khorovod-ipu" / "src"


@dataclass(frozen=True)
class Import:
    """One import statement's target.

    Attributes:
        target: dotted name of the module, resolved to the longest existing one of this package.
        line: where it stands.
        lazy: whether it stands inside a function.
    """

    target: str
    line: int
    lazy: bool


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def place(self) -> str:
        """The path to print."""
        return str(self.path.relative_to(ROOT))

    def imports(self) -> Iterator[Import]:
        """Everything this module imports, except under ``if TYPE_CHECKING``."""
        yield from _imports(self, self.tree, lazy=False)


@cache
def modules() -> dict[str, Module]:
    """All modules of ``src/horovod`` by dotted name."""
    return _below(SRC, "horovod")


@cache
def ipu_modules() -> dict[str, Module]:
    """All modules of ``khorovod-ipu`` by dotted name."""
    return _below(IPU_SRC, ".")


@cache
def all_modules() -> dict[str, Module]:
    """The modules of both distributions."""
    return {**modules(), **ipu_modules()}


def _below(source: Path, folder: str) -> dict[str, Module]:
    found = {}
    for path in sorted((source / folder).rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found[name] = Module(name, path, text, ast.parse(text, str(path)))
    return found


def _imports(module: Module, node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _imports(module, other, lazy)
        elif isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(_longest(alias.name), child.lineno, lazy)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(module, child)
            for alias in child.names:
                yield Import(_longest(f"{base}.{alias.name}"), child.lineno, lazy)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(module, child, lazy or inside)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    if module.path.name != "__init__.py":
        parts = parts[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _longest(name: str) -> str:
    """``horovod.errors.InitError`` becomes ``horovod.errors``; names of other packages lose nothing."""
    if name.split(".")[0] != "horovod":
        return name
    while name not in modules():
        name = name.rpartition(".")[0]
    return name
