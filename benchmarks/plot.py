"""Draw a result of ``horovod.bench`` as SVG.

python benchmarks/plot.py benchmarks/allreduce-np2.json > docs/allreduce.svg
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from horovod.bench.cases import OPS, format_seconds
from horovod.phrases import format_bytes

__all__ = ["picture"]

_COLOURS = ("#0b6e4f", "#5cb270", "#c1440e", "#3a5a98", "#8a5a9e", "#8c8c8c")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760, 440, 80, 50, 160, 60


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _document(title: str, parts: Sequence[str], height: int = _HEIGHT) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, _text(_WIDTH / 2, 26, title, size=16), *parts, "</svg>", ""])


def _axis(low: float, high: float, start: float, end: float) -> tuple[float, float]:
    """Scale and offset that put the logarithms of ``low`` and ``high`` at ``start`` and ``end``."""
    span = math.log10(high) - math.log10(low) or 1.0
    scale = (end - start) / span
    return scale, start - scale * math.log10(low)


def _lines(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    x_ticks: Mapping[float, str],
    y_ticks: Mapping[float, str],
) -> str:
    """Draw lines over two logarithmic axes.

    Args:
        title: stands above.
        series: points of each line, all coordinates above zero.
        x_ticks: label at each marked x.
        y_ticks: label at each marked y; those outside the points' range are left out.
    """
    points = [point for line in series.values() for point in line]
    if not points:
        return _document(title, [_text(_WIDTH / 2, _HEIGHT / 2, "nothing was measured")])
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_scale, x_offset = _axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    y_scale, y_offset = _axis(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for value, label in x_ticks.items():
        x = x_scale * math.log10(value) + x_offset
        parts.append(f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#eee"/>')
        parts.append(_text(x, _HEIGHT - _BOTTOM + 18, label, size=10))
    for value, label in y_ticks.items():
        if min(ys) <= value <= max(ys):
            y = y_scale * math.log10(value) + y_offset
            parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
            parts.append(_text(_LEFT - 6, y + 4, label, "end", 10))
    for index, (name, line) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        places = [(x_scale * math.log10(x) + x_offset, y_scale * math.log10(y) + y_offset) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        y = _TOP + 10 + 20 * index
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 14}" y="{y - 9}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(_WIDTH - _RIGHT + 32, y + 2, name, "start"))
    return _document(title, parts)


def _bars(title: str, items: Sequence[tuple[str, float, str]]) -> str:
    """Draw horizontal bars.

    Args:
        title: stands above.
        items: label, length (below zero is drawn as zero), and what to write at the end of each.
    """
    longest = max((value for _, value, _ in items), default=0.0) or 1.0
    left, height = 300, _TOP + 26 * len(items) + 20
    parts = []
    for index, (label, value, text) in enumerate(items):
        y = _TOP + 26 * index
        width = max(0.0, value) / longest * (_WIDTH - left - 110)
        parts.append(_text(left - 8, y + 14, label, "end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="18" fill="{_COLOURS[0]}"/>')
        parts.append(_text(left + width + 6, y + 14, text, "start", 11))
    return _document(title, parts, height)


def picture(result: dict[str, Any]) -> str:
    """Return the result of a collective as lines over the size, and any other one as bars."""
    title = f"{result['kind']}, {result['np']} ranks on {result['host']['cores']} cores"
    if result["kind"] in OPS:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in result["rows"]:
            for name, one in row["results"].items():
                series.setdefault(name, []).append((row["nbytes"], one["median_s"]))
        sizes = {float(row["nbytes"]): format_bytes(row["nbytes"]) for row in result["rows"]}
        times = {10.0**power: format_seconds(10.0**power) for power in range(-7, 3)}
        return _lines(f"{title}: time of one call", series, sizes, times)
    items = [
        (f"{row.get('model', row.get('nbytes'))}, {name}", one["median_s"], format_seconds(one["median_s"]))
        for row in result["rows"]
        for name, one in row["results"].items()
    ]
    return _bars(title, items)


if __name__ == "__main__":
    sys.stdout.write(picture(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
