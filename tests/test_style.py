"""No sentence begins with the pronoun *Who* or *What*, and each public class is defined once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sources import ROOT, modules

#: A sentence that begins with a pronoun and is not a question.
PRONOUN = re.compile(
    r"(?:^|(?<=[.!:;?] )|(?<=\n\n)|(?<=- ))(?:Who|What|Whoever|Whatever)\b[^.?!]*(?:[.!]|$)", re.MULTILINE
)
FOLDERS = ("src", "khorovod-ipu", "tests", "benchmarks", "scripts", "examples")


def sentences(text: str) -> list[str]:
    """Return the sentences of a text that begin with a pronoun."""
    joined = re.sub(r"(?<!\n)\n[ \t#>]*(?=[^\s\-*|#])", " ", text)
    return [match[0] for match in PRONOUN.finditer(joined)]


def texts(path: Path) -> Iterator[str]:
    """Yield the prose of a file: a whole page; strings and blocks of comments of a module."""
    source = path.read_text(encoding="utf-8")
    if "Who" not in source and "What" not in source:
        return  # parsing all files takes a minute
    if path.suffix == ".md":
        yield re.sub(r"```.*?```", "", source, flags=re.DOTALL)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"\n[ \t]+", "\n", node.value)
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1 and block:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            last = token.start[0]
    yield " ".join(block)


def test_no_sentence_begins_with_who_or_what() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "khorovod-ipu").rglob("*.md")]
    code = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.name != "test_style.py"]
    found = {str(path.relative_to(ROOT)): [s for text in texts(path) for s in sentences(text)] for path in pages + code}
    wrong = {place: here for place, here in found.items() if here}
    assert not wrong, 'begin with the noun: "the rank that …", "data that …"'


def test_each_public_class_is_defined_once() -> None:
    names = Counter(
        node.name
        for module in modules().values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    # Horovod has these names in several modules.
    horovods = {"Backend", "Store", "TorchEstimator", "TorchModel"}
    twice = [name for name, count in names.items() if count > 1 and name not in horovods]
    assert not twice, "choose another name, or import the class that exists"


def test_a_sentence_with_a_pronoun_is_found() -> None:
    assert sentences("It waits. Who is late\nis named.") == ["Who is late is named."]
    assert sentences("What a call does.") and sentences("- Whatever comes is kept.")
    assert not sentences("What is a rank? Nobody knows who did what. Whole ranks do.")
