"""The samples in Markdown pages: which there are, how each is run, and what it must print.

A fenced ``python`` block is a script, run on two ranks. A fenced ``console`` block holds commands after ``$ ``
and what they print. A ``text`` block right after a ``python`` block is what that prints. A comment before the
fence says what differs: ``<!-- np: 1 -->``, ``<!-- exit: 1 -->``, or ``<!-- not run: why -->``.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Sample", "missing_lines", "samples_in"]

_FENCE = re.compile(
    r"(?P<comments>(?:^<!--[^\n]*-->\n)*)^```(?P<language>python|console|text)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Sample:
    """One sample.

    Attributes:
        label: page and line.
        language: ``python`` or ``console``.
        text: the script, or the commands, one a line.
        options: what the comments before the fence say.
        output: the lines that must appear; ``...`` stands for anything.
    """

    label: str
    language: str
    text: str
    options: dict[str, str]
    output: list[str] = field(default_factory=list)


def samples_in(page: Path, label: str) -> list[Sample]:
    """All samples of a page, in order.

    Returns:
        The samples; ``text`` blocks that follow no ``python`` block are ignored.
    """
    text, found = page.read_text(encoding="utf-8"), []
    end = -1
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        body, language = match["body"], match["language"]
        options = dict(re.findall(r"<!-- *([a-z ]+?)(?:: *(.*?))? *-->", match["comments"]))
        if language == "text":
            if found and found[-1].language == "python" and not text[end : match.start()].strip():
                found[-1].output = body.splitlines()
        elif language == "console":
            lines = body.splitlines()
            commands = [entry[2:] for entry in lines if entry.startswith("$ ")]
            printed = [entry for entry in lines if entry and not entry.startswith("$ ")]
            found.append(Sample(f"{label}:{line}", language, "\n".join(commands), options, printed))
        else:
            found.append(Sample(f"{label}:{line}", language, body, options))
        end = match.end()
    return found


def missing_lines(expected: list[str], output: str) -> list[str]:
    """The expected lines that no line of ``output`` matches; ``...`` stands for anything."""
    printed = [" ".join(line.split()) for line in output.splitlines()]
    missing = []
    for line in expected:
        words = " ".join(line.split())
        pattern = "".join(f"[{c}]" if c in "[?*" else c for c in words).replace("...", "*")
        if not any(fnmatch.fnmatchcase(candidate, pattern) for candidate in printed):
            missing.append(line)
    return missing
