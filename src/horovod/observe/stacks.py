"""The Python stacks of this process, and which of its threads can still submit operations."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from types import FrameType

from horovod.engine.handles import Handle
from horovod.phrases import printable

__all__ = ["all_threads", "handles_waited_for", "render", "user_lines"]

_OWN = "horovod"
_PLUMBING = (_OWN, "torch")
#: Frameworks whose code stands between the user's line and the place where they wait.
_FRAMEWORKS = ("tensorflow", "keras", "tf_keras", "jax", "jaxlib")
#: Rooms that start threads of this package; no user code runs on these.
_OWN_THREADS = tuple(f"horovod.{room}" for room in ("engine", "links", "observe", "rendezvous", "transports"))
#: Packages whose code never calls this one by itself. A thread that runs nothing else submits no operations unless
#: another thread gives it work: threads that prepare batches, show progress, write logs, or wait for work in a pool.
_INERT = frozenset(
    {"threading", "queue", "multiprocessing", "concurrent", "logging", "selectors", "torch", "tqdm", "ray"}
)
#: Only these may stand above the place where a thread waits in the engine; a signal handler of the user is not allowed.
_WAITING = frozenset({_OWN, "threading", "contextlib", "linecache", "msgspec"})
_MOST = 40
#: Outermost frames kept of a longer stack (an import or a recursion): the user's line is among them.
_OUTER = 10
#: Python leaves these out of its tracebacks, too.
_IMPORTING = "<frozen importlib"
_INSTALLED = ("/site-packages/", "/dist-packages/", f"{sysconfig.get_path('stdlib')}/", "<frozen ")
_LINE_LENGTH = 160


def all_threads() -> dict[str, list[str]]:
    """Return the stack of every thread of Python, by the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'thread')} ({ident})": render(frame, whole=True)
        for ident, frame in sys._current_frames().items()
    }


def handles_waited_for(waits: Mapping[int, Handle]) -> tuple[dict[int, Handle], str]:
    """Return ``waits`` without threads that run other code meanwhile, such as a signal handler; and the name of a
    thread that may still submit operations, empty when there is none. Signal handlers that may come later do not count.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    found: dict[int, Handle] = {}
    free = ""
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        if ident in waits and _is_undisturbed(frame):
            found[ident] = waits[ident]
        elif thread is threading.main_thread() or isinstance(thread, threading.Timer) or not _is_inert(frame):
            free = free or (thread.name if thread is not None else f"thread {ident}")
    return found, free


def _is_undisturbed(frame: FrameType | None) -> bool:
    """Whether a thread that waits in the engine runs no other code meanwhile."""
    while frame is not None and _room(frame) != _OWN:
        if _room(frame) not in _WAITING:
            return False
        frame = frame.f_back
    return True


def _is_inert(frame: FrameType | None) -> bool:
    """Whether a thread runs only code that never submits operations."""
    outermost = frame
    while frame is not None:
        if _room(frame) not in _INERT:
            outermost = frame
        frame = frame.f_back
    # Threads of the engine and of the recording: their outermost frame tells.
    if _room_within(outermost) in _OWN_THREADS:
        return True
    return outermost is not None and _room(outermost) in _INERT


def render(frame: FrameType | None, whole: bool = False, waits: bool = False) -> list[str]:
    """Return a stack as Python prints it, outermost frame first. ``whole``: also the frames of this package at the
    inner end, which say nothing about the user's code. ``waits``: the thread waits in the engine.
    """
    frames = []
    if waits:
        while frame is not None and _room(frame) in _WAITING:
            frame = frame.f_back
    while frame is not None:
        if whole or not frame.f_code.co_filename.startswith(_IMPORTING):
            frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    if frames and not whole:
        # The frames of torch around this package's functions say nothing either.
        room = _room(frames[0][0])
        plumbing = _PLUMBING if room == _OWN else _FRAMEWORKS if room in _FRAMEWORKS else ()
        while len(frames) > 1 and _room(frames[0][0]) in plumbing:
            del frames[0]
    lines = []
    left_out = range(_MOST - _OUTER, len(frames) - _OUTER if len(frames) > _MOST else 0)
    for index in reversed(range(len(frames))):
        if index in left_out:
            if index == left_out[0]:
                lines.append(f"... {len(left_out)} frames ...")
            continue
        inner, number = frames[index]
        code = inner.f_code
        lines.append(f'File "{code.co_filename}", line {number}, in {code.co_name}'[:_LINE_LENGTH])
        source = linecache.getline(code.co_filename, number, inner.f_globals).strip()
        if source:
            lines.append(f"  {source}"[:_LINE_LENGTH])
    return [printable(line) for line in lines]


def user_lines(stack: Sequence[str], most: int) -> list[str]:
    """Return the innermost lines of a stack of ``render``, without installed packages if other code is there."""
    own: list[str] = []
    keep = False
    for line in stack:
        if line.startswith('File "'):
            keep = not any(part in line for part in _INSTALLED)
        if keep:
            own.append(line)
    return [*(own or stack)][-most:]


def _room_within(frame: FrameType | None) -> str:
    """Return the package and subpackage of the code of ``frame``, such as ``horovod.engine``."""
    return ".".join(str(frame.f_globals.get("__name__", "")).split(".")[:2]) if frame is not None else ""


def _room(frame: FrameType) -> str:
    """Return the package that the code of ``frame`` belongs to."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
