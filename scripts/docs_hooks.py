"""Hooks of mkdocs: take the pages of the root into the site, list modules, and choose the members of the API pages."""

from __future__ import annotations

import ast
import importlib
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from horovod.bindings import misuse

# mkdocstrings finds a method by its name with the class.
misuse.without_class_names = lambda cls: cls

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the site, and drop those to files of the repository that it does not have."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        place = posixpath.normpath(posixpath.join(folder, path))
        if not path or files.get_file_from_path(place):
            return match[0]
        # A page of the root, seen from docs/, or from a page of the root itself.
        outside = place.removeprefix("../")
        if files.get_file_from_path(outside):
            return f"[{text}]({posixpath.relpath(outside, folder or '.')}{'#' + anchor if anchor else ''})"
        is_in_repository = any((ROOT / top / place).exists() for top in ("docs", "."))
        return text if is_in_repository else match[0]

    markdown = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", link, markdown)
    markdown = re.sub(r"^<!-- modules: (\S+) -->$", _modules, markdown, flags=re.MULTILINE)
    return re.sub(r"^::: (\S+)$", _members, markdown, flags=re.MULTILINE)


def _modules(match: re.Match[str]) -> str:
    """List the modules of a package with the first sentence of their docstrings."""
    rows = []
    for path in sorted((ROOT / "src" / match[1].replace(".", "/")).glob("[!_]*.py")):
        words = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        summary = re.sub(r"``(.+?)``", r"`\1`", " ".join(words.split())).replace("|", "\\|")
        rows.append(f"| `{path.stem}` | {summary} |\n")
    return f"| `{match[1]}` | |\n|---|---|\n{''.join(rows)}\n"


def _members(match: re.Match[str]) -> str:
    """Name the public names of a module, wherever they are defined."""
    module = importlib.import_module(match[1])
    names = [name for name in getattr(module, "__all__", []) if not name.startswith("__")]
    return f"::: {match[1]}\n    options:\n      members: {names}\n"
