"""A summary of a timeline as a picture: where an average step goes, and one step drawn out."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from horovod.timeline.read import RankTrace, Span
from horovod.timeline.summary import StepSummary, Summary

__all__ = ["draw"]

_WIDTH, _LEFT, _RIGHT = 960, 90, 30
_BAR, _GAP = 22, 10
_COLOURS = {
    "compute": "#4c78a8",
    "waiting for ranks": "#e45756",
    "waiting for data": "#f2a541",
    "communication": "#54a24b",
}
_STYLE = "text{font:13px sans-serif;fill:#222}.small{font-size:11px;fill:#555}.head{font-size:15px;font-weight:bold}"


class _Canvas:
    """Collects the elements of an SVG picture from top to bottom."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.y = 14.0

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Write."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, what: str, title: str) -> None:
        """Draw a bar that says what it is when one points at it."""
        if width > 0:
            self._parts.append(
                f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.5):.2f}" height="{height}" '
                f'fill="{_COLOURS[what]}"><title>{escape(title)}</title></rect>'
            )

    def line(self, x: float, top: float, bottom: float) -> None:
        """Draw a line from top to bottom."""
        self._parts.append(
            f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#ccc" stroke-width="1"/>'
        )

    def svg(self) -> str:
        """Return the picture."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{self.y:.0f}" '
            f'viewBox="0 0 {_WIDTH} {self.y:.0f}"><style>{_STYLE}</style>'
            f'<rect width="100%" height="100%" fill="white"/>'
        )
        return "\n".join([head, *self._parts, "</svg>\n"])


def draw(summary: Summary, ranks: Mapping[int, RankTrace]) -> str:
    """Return the picture as SVG.

    Args:
        summary: of the trace.
        ranks: the trace.
    """
    canvas = _Canvas()
    _legend(canvas)
    _averages(canvas, summary)
    _one_step(canvas, summary, ranks)
    canvas.y += 10
    return canvas.svg()


def _legend(canvas: _Canvas) -> None:
    x = float(_LEFT)
    for what in _COLOURS:
        canvas.box(x, canvas.y, 12, 12, what, what)
        canvas.text(x + 17, canvas.y + 11, what)
        x += 17 + 8 * len(what) + 20
    canvas.y += 34


def _averages(canvas: _Canvas, summary: Summary) -> None:
    canvas.text(_LEFT, canvas.y, "Average step of each rank", "head")
    canvas.y += 12
    longest = max((rank.mean.total_ms for rank in summary.ranks), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT - 90) / longest
    for rank in summary.ranks:
        step, x = rank.mean, float(_LEFT)
        canvas.text(_LEFT - 8, canvas.y + 16, f"rank {rank.rank}", anchor="end")
        parts = (
            ("compute", step.compute_ms),
            ("waiting for ranks", step.for_ranks_ms),
            ("waiting for data", step.for_data_ms),
        )
        for what, value in parts:
            canvas.box(x, canvas.y, value * scale, _BAR, what, f"{what}: {value:.2f} ms")
            x += value * scale
        canvas.text(x + 6, canvas.y + 16, f"{step.total_ms:.2f} ms, last {rank.last:.0%}", "small")
        canvas.y += _BAR + _GAP
    canvas.y += 24


def _one_step(canvas: _Canvas, summary: Summary, ranks: Mapping[int, RankTrace]) -> None:
    step = _typical(summary)
    if step is None:
        return
    limits = (step.begin_ms * 1000, (step.begin_ms + step.total_ms) * 1000)
    canvas.text(_LEFT, canvas.y, f"Step {step.number}, a usual one: {step.total_ms:.2f} ms", "head")
    canvas.y += 14
    top = canvas.y
    for rank, trace in sorted(ranks.items()):
        canvas.text(_LEFT - 8, canvas.y + 13, f"rank {rank}", anchor="end")
        canvas.box(_LEFT, canvas.y, _WIDTH - _LEFT - _RIGHT, _BAR / 2 + 6, "compute", f"rank {rank} computes")
        for op in trace.ops:
            if op.waited is None:
                continue
            until = min(max(op.ready, op.waited), op.ended)
            _stretch(canvas, limits, (op.waited, until), _BAR / 2 + 6, "waiting for ranks", op.name)
            _stretch(canvas, limits, (until, op.ended), _BAR / 2 + 6, "waiting for data", op.name)
        canvas.y += _BAR / 2 + 7
        for span in trace.executions:
            _stretch(canvas, limits, span, 8, "communication", "")
        canvas.y += 8 + _GAP
    for tenth in range(0, 11, 2):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * tenth / 10
        canvas.line(x, top, canvas.y)
        canvas.text(x, canvas.y + 14, f"{step.total_ms * tenth / 10:.2f} ms", "small", "middle")
    canvas.y += 24


def _stretch(canvas: _Canvas, limits: Span, span: Span, height: float, what: str, name: str) -> None:
    begin, end = max(span[0], limits[0]), min(span[1], limits[1])
    if end > begin:
        scale = (_WIDTH - _LEFT - _RIGHT) / (limits[1] - limits[0])
        title = f"{what} {name}: {(span[1] - span[0]) / 1000:.3f} ms"
        canvas.box(_LEFT + (begin - limits[0]) * scale, canvas.y, (end - begin) * scale, height, what, title)


def _typical(summary: Summary) -> StepSummary | None:
    """The step of the first rank that takes a middling time."""
    if not summary.ranks:
        return None
    own = sorted((s for s in summary.steps if s.rank == summary.ranks[0].rank), key=lambda s: s.total_ms)
    step = own[len(own) // 2]
    return step if step.total_ms > 0 else None
