"""The flight recorder: dumps the latest operations of this rank after a failure or on request."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from horovod.core.stall import Waiting
from horovod.engine import signals
from horovod.engine.engine import Engine
from horovod.engine.times import REQUEST, now
from horovod.logs import logger
from horovod.observe import stacks
from horovod.observe.queries import RankStatus
from horovod.timeline import dumps

__all__ = ["DEFAULT_FOLDER", "Recorder", "Trigger"]

#: Folder of a requested dump if HOROVOD_FLIGHT_RECORDER_DIR is not set.
DEFAULT_FOLDER = "horovod-flight-recorder"


class Recorder:
    """See the module. With an empty folder only requested dumps are written."""

    def __init__(
        self, subject: Engine, folder: str, job: str, describe: Callable[[], RankStatus],
        members: Callable[[int], tuple[int, ...]],
    ) -> None:  # fmt: skip
        self._subject, self._members = subject, members
        self._folder, self._job, self._describe = folder, job, describe

    def after_failure(self, reason: str, failure: str = "") -> None:
        """Write a dump if HOROVOD_FLIGHT_RECORDER_DIR is set; never raises. ``failure``: one that the engine does not
        know.
        """
        if self._folder:
            self._write(reason, Path(self._folder), failure)

    def as_asked(self, reason: str) -> Path | None:
        """Write a requested dump, by default into ``horovod-flight-recorder`` here, and return its path; None if that
        failed, which a warning says.
        """
        return self._write(reason, Path(self._folder or DEFAULT_FOLDER))

    def _write(self, reason: str, folder: Path, failure: str = "") -> Path | None:
        try:
            return dumps.write(self._dump(reason, failure), folder)
        except Exception as error:  # a report must not become the failure
            logger.warning(f"the flight recorder could not write to {folder}: {error}")
            return None

    def _dump(self, reason: str, failure: str) -> dumps.Dump:
        status, link, records = self._describe(), self._subject.link, list(self._subject.ring)
        blocked = status.blocked
        coordinator, generation = link.coordinator, link.generation
        pending = [Waiting(*item) for item in coordinator.waiting()] if coordinator is not None else []
        return dumps.Dump(
            version=dumps.VERSION,
            job=self._job,
            rank=link.rank,
            size=generation.size,
            host=os.uname().nodename,
            pid=os.getpid(),
            reason=reason,
            time_s=time.time(),
            clock_ns=now(),
            position=self._subject.position,
            failure=failure or status.failure,
            wait=dumps.Wait(blocked.request, blocked.executing) if blocked is not None else None,
            stack=status.stack,
            threads=stacks.all_threads(),
            pending=[dumps.PendingOperation(item.request, item.present, item.missing) for item in pending],
            operations=[
                dumps.Operation(record[REQUEST], self._members(record[REQUEST].process_set), *record[1:])
                for record in records
            ],
            generation=generation.number,
        )


class Trigger:
    """Lets SIGUSR1 call a function in the main thread, unless the script or a library handles the signal."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._is_set = False
        self._is_calling = False
        self._owner = os.getpid()

    def set(self) -> None:
        """Install the handler; does nothing outside the main thread, or when SIGUSR1 is handled already."""
        if threading.current_thread() is not threading.main_thread() or self._is_set:
            return
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and not _is_caught(signal.SIGUSR1):
            signals.trust(Trigger._handle)
            signal.signal(signal.SIGUSR1, self._handle)
            self._is_set = True

    def unset(self) -> None:
        """Restore the signal's default, if the handler is still ours."""
        if (
            self._is_set
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGUSR1) == self._handle
        ):
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            self._is_set = False

    def _handle(self, number: int, frame: FrameType | None) -> Any:
        # A forked child, such as a loader's worker, has inherited the handler. Signals that come during the call are
        # merged, as the kernel merges pending ones.
        if os.getpid() == self._owner and not self._is_calling:
            self._is_calling = True
            try:
                self._call()
            finally:
                self._is_calling = False


def _is_caught(number: signal.Signals) -> bool:
    """Whether the process has a handler for a signal, including one of C code such as faulthandler's."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
