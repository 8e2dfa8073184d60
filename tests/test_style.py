"""Plain English, and one definition of each public class. What is left to repair stands in lists that may only shrink.

``python tests/test_style.py`` lowers the counts in ``tests/support/style.txt`` to today's; it never raises one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent / "support"))

from sources import ROOT, modules

LISTS = ROOT / "tests" / "support" / "style.txt"
#: A sentence that begins with a pronoun and is no question.
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


@cache
def pronouns() -> Counter[str]:
    """Return how many sentences of each file begin with a pronoun."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "khorovod-ipu").rglob("*.md")]
    code = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.name != "test_style.py"]
    counts = {path: sum(len(sentences(text)) for text in texts(path)) for path in (*pages, *code)}
    return Counter({str(path.relative_to(ROOT)): count for path, count in counts.items() if count})


@cache
def classes() -> Counter[str]:
    """Return the public names of classes that src/horovod defines more than once."""
    names = Counter(
        node.name
        for module in modules().values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return Counter({name: count for name, count in names.items() if count > 1})


def allowed(title: str) -> dict[str, int]:
    """Return one of the lists."""
    part = LISTS.read_text(encoding="utf-8").partition(f"[{title}]\n")[2].partition("\n[")[0]
    return {name: int(count) for name, count in (line.rsplit(" ", 1) for line in part.splitlines() if line)}


def test_no_new_sentence_begins_with_who_or_what() -> None:
    known = allowed("pronouns")
    more = {place: count for place, count in pronouns().items() if count > known.get(place, 0)}
    assert not more, 'begin with the noun: "the rank that …", "data that …"'


def test_each_public_class_is_defined_once() -> None:
    known = allowed("classes")
    more = {name: count for name, count in classes().items() if count > known.get(name, 1)}
    assert not more, "choose another name, or import the class that exists"


def test_a_sentence_with_a_pronoun_is_found() -> None:
    assert sentences("It waits. Who is late\nis named.") == ["Who is late is named."]
    assert sentences("What a call does.") and sentences("- Whatever comes is kept.")
    assert not sentences("What is a rank? Nobody knows who did what. Whole ranks do.")


if __name__ == "__main__":
    lines = []
    for title, counts in (("pronouns", pronouns()), ("classes", classes())):
        known = allowed(title)
        left = {name: min(count, known[name]) for name, count in counts.items() if name in known}
        lines += [f"[{title}]", *(f"{name} {count}" for name, count in sorted(left.items())), ""]
    LISTS.write_text("\n".join(lines), encoding="utf-8")
