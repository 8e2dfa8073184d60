"""The kernel's side of a notebook's session: starts ranks, makes them run cells, and reports the results."""

from __future__ import annotations

import ast
import atexit
import itertools
import os
import pickle
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import zmq

from horovod.errors import CellError
from horovod.launch.assemble import assemble, interface_settings
from horovod.launch.plan import Display, LaunchRequest
from horovod.launch.signals import handled
from horovod.launch.ssh import Access
from horovod.notebook import messages
from horovod.notebook.messages import Done, Hello, LeaveRanks, Meet, Push, RunCell, Stop
from horovod.notebook.ranks import GatheredOutput, SupervisedRanks
from horovod.phrases import list_ranks
from horovod.pickling import pickled
from horovod.rendezvous import curve
from horovod.rendezvous.interfaces import own_addresses
from horovod.rendezvous.keys import purpose_key
from horovod.rendezvous.service import listen

__all__ = ["Session"]

#: Seconds to wait, after a cell failed on some ranks, for the others to fail, too, before notifying these.
_SAME_S = 0.5
#: Seconds to wait for the end of output after all ranks have answered: a cell may close the streams.
_OUTPUT_S, _STOP_S, _LOOK_MS = 5.0, 5.0, 100
#: Milliseconds until more output is shown: a kernel sends each part as a message, and drops some of too many.
_GATHER_MS = 20
_MOST_SHOWN = 64 << 20
_GO_ON = "Start new ranks, whose variables are empty: session.restart(), or horovod.interactive() as before"
_Reply = dict[int, Done]


class _Interrupted(KeyboardInterrupt):
    _render_traceback_ = CellError._render_traceback_


_Interrupted.__name__ = "KeyboardInterrupt"  # the name that notebooks show


class _Text:
    """Placeholder with the ``repr`` of a rank's value that cannot be sent."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class Session:
    """Ranks that wait for cells; ``interactive`` creates it.

    Args:
        np: number of ranks.
        chosen: returns the hosts.
        python: Python interpreter of the ranks, on all hosts.
        access: settings for access to other hosts.
        settings: environment variables set by arguments.
    """

    current: ClassVar[Session | None] = None
    """The one that ``%%hvd`` uses."""

    def __init__(self, np: int, chosen: Callable[[], Any], python: str, access: Access, settings: dict[str, str]):
        self.size = np
        self._chosen, self._python, self._access, self._settings = chosen, python, access, settings
        self._numbers = itertools.count(1)
        self._turn = threading.Lock()
        self._interrupts = 0  # during the present call
        self._sent_interrupts = 0
        self._end: str | None = "the ranks have not been started"
        self._start()

    def _start(self) -> None:
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._output = GatheredOutput()
        self._peers: dict[int, bytes] = {}
        try:
            chosen = self._chosen()
            access = replace(self._access, starters=chosen.starters)
            is_far = not all(place.is_here for place in chosen.places)
            settings = {**self._settings, **(interface_settings(access.interfaces) if is_far else {})}
            if os.environ.get("MPLBACKEND", "").startswith("module://"):
                settings["MPLBACKEND"] = "agg"  # the kernel's own backend draws under its cells
            request = LaunchRequest((self._python, "-m", messages.PROGRAM), chosen.num_proc, os.environ)
            key = purpose_key(bytes.fromhex(request.key), messages.CELLS)
            self._socket = curve.server_socket(self._zmq, key, max_bytes=messages.MOST_BYTES)
            where = [f"ipc://@horovod-cells-{secrets.token_hex(16)}"]
            endpoints = listen(self._socket, where + (own_addresses(access.interfaces) if is_far else []))
            request = replace(request, flags={**settings, messages.CELLS_VARIABLE: ",".join(endpoints)})
            self._assembly = assemble(request, chosen.places, access)
        except BaseException:
            self._zmq.destroy()
            self._output.close()
            raise
        display = Display(launcher="hvd", label="[{rank}] ", is_always=True, merges_tracebacks=False)
        plan, jobs = replace(self._assembly.plan, display=display), self._assembly.jobs()
        self._ranks = SupervisedRanks(plan, self._output, jobs, self._assembly.ended)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._output.news, zmq.POLLIN)
        self._end = None
        atexit.register(self.close)
        self._ranks.thread.start()
        try:
            with handled((signal.SIGINT,), self._interrupt):
                self._gather(0, self._interrupts)
        except BaseException:
            self.close()
            raise
        Session.current = self

    @property
    def is_alive(self) -> bool:
        """Whether the ranks can run cells."""
        return self._end is None and self._ranks.is_alive

    def execute(self, source: str, name: str = "<cell>") -> Any:
        """Run code on all ranks, and print their output here meanwhile.

        Args:
            source: the code.
            name: name of the code in tracebacks.

        Returns:
            The value of the last expression on rank 0; None if the code does not end with an expression.

        Raises:
            CellError: the code failed on a rank (the message has its traceback), or the ranks have ended.
            KeyboardInterrupt: Ctrl-C; it was passed on to the ranks, which stay alive.
            SyntaxError: the code is not Python.

        Blocks until all ranks have run it.
        """
        compile(source, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # ast.parse would add its frame to errors
        replies = self._ask(lambda n, sent: RunCell(n, sent, source, name, False, _MOST_SHOWN))
        return self._values(replies, is_shown=True)[0]

    def push(self, variables: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Set variables on all ranks.

        Args:
            variables: values by name.
            **more: more values by name.

        Raises:
            ValueError: a value cannot be pickled.
            CellError: a rank cannot unpickle them; or the ranks have ended.
        """
        names = {**(variables or {}), **more}
        try:
            data = pickled(names)
        except Exception as error:  # any error of the objects' own code
            raise ValueError(f"cannot send {', '.join(names)} to other processes: {error}") from error
        if len(data) > messages.MOST_BYTES - (1 << 20):
            raise ValueError(
                f"push() takes 1 GiB at once; received {len(data)} bytes. Let the ranks read a file instead"
            )
        self._ask(lambda n, sent: Push(n, sent, data))

    def pull(self, expression: str) -> list[Any]:
        """Return a variable, or the value of an expression, of every rank, in rank order.

        Args:
            expression: such as ``"loss"`` or ``"model.state_dict()"``.

        Raises:
            CellError: the expression failed on a rank; a value cannot be sent; or the ranks have ended.
            SyntaxError: ``expression`` is not an expression.
        """
        compile(expression.strip(), "<pull>", "eval", ast.PyCF_ONLY_AST, dont_inherit=True)
        most = messages.MOST_BYTES - (1 << 20)
        return self._values(self._ask(lambda n, sent: RunCell(n, sent, expression.strip(), "<pull>", True, most)))

    def restart(self) -> None:
        """End the ranks, also those of a later session, and start new ones with the same arguments."""
        self.close()
        if Session.current is not None:
            Session.current.close()
        self._start()

    def close(self) -> None:
        """End the ranks, also in the middle of another thread's call. Blocks until all have ended."""
        if self._end is None and self._turn.locked():
            self._ranks.order(b"T")  # that call uses the connections, so it releases them
        with self._turn:
            if self._end is None:
                self._stop()
                self._end = "the session was closed"
                self._release()

    def _stop(self) -> None:
        self._ranks.stopping()
        if self._ranks.is_alive and len(self._peers) == self.size:
            self._send(Stop())
            deadline = time.monotonic() + _STOP_S
            while self._ranks.thread.is_alive() and time.monotonic() < deadline:
                self._ranks.thread.join(_LOOK_MS / 1e3)
                self._output.show()
        self._ranks.order(b"T")
        self._ranks.why()
        self._output.show()

    def _release(self) -> None:
        atexit.unregister(self.close)
        self._assembly.close()
        self._zmq.destroy()
        self._output.close()

    def _send(self, message: msgspec.Struct, ranks: Any = None) -> None:
        data = msgspec.msgpack.encode(message)
        for rank in self._peers if ranks is None else ranks:
            self._socket.send_multipart([self._peers[rank], data])

    def _ask(self, make: Callable[[int, int], RunCell | Push | Meet]) -> _Reply:
        """Make all ranks execute a message; return their replies."""
        if not self._turn.acquire(blocking=False):
            raise CellError("the ranks are still busy with another call, of another thread")
        try:
            if self._end is not None:
                raise CellError(f"{self._end}\n{_GO_ON}")
            self._interrupts = 0
            with handled((signal.SIGINT,), self._interrupt):
                replies, left = self._gather_after(make, 0)  # an interrupt may come while it is sent
                note = self._realign(replies, left)
            interrupted = self._interrupts > 0
        finally:
            self._turn.release()
        failed = {rank: done for rank, done in replies.items() if done.error}
        if interrupted:
            raise _Interrupted(_report("was interrupted", failed, self.size) + note)
        if failed:
            traces = {rank: done.traceback for rank, done in failed.items()}
            raise CellError(_report("failed", failed, self.size) + note, traces)
        return replies

    def _gather(self, number: int, seen: int) -> tuple[_Reply, set[int]]:
        """Wait for all ranks; return replies, and ranks that had to leave the job. Number 0 waits for their Hello.

        Interrupts after the first ``seen`` are passed on to the ranks.
        """
        replies: _Reply = {}
        left: set[int] = set()
        failed_at, complete_at = 0.0, 0.0
        while True:
            has_shown = self._output.show()
            self._receive(number, replies)
            if self._interrupts > seen:
                seen += 1
                if number == 0:
                    raise KeyboardInterrupt
                self._sent_interrupts += seen == 1
                self._ranks.order((b"I", b"T", b"K")[min(seen, 3) - 1])
            if not self._ranks.is_alive:
                raise self._death()
            now = time.monotonic()
            if len(self._peers if number == 0 else replies) == self.size:
                complete_at = complete_at or now
                ended = {(number, rank, stream) for rank in replies for stream in (1, 2)}
                if ended <= self._output.ended or now > complete_at + _OUTPUT_S:
                    self._output.show()
                    self._output.ended.clear()
                    return replies, left
            elif failed := {rank for rank, done in replies.items() if done.error}:
                failed_at = failed_at or now
                if now > failed_at + _SAME_S and (late := sorted(failed - left)):
                    running = list_ranks(sorted(set(self._peers) - set(replies)))
                    for rank in late:
                        text = f"hvd: rank {rank} has failed ({replies[rank].error}); still running: {running}\n"
                        self._output.put(1, text.encode())
                    self._send(LeaveRanks(), late)
                    left |= failed
            if has_shown:
                self._socket.poll(_GATHER_MS)
            else:
                self._poller.poll(_LOOK_MS)

    def _receive(self, number: int, replies: _Reply) -> None:
        while self._socket.poll(0):
            sender, data = self._socket.recv_multipart()
            message = msgspec.msgpack.decode(data, type=messages.FromRank)
            if isinstance(message, Hello):
                self._peers[message.rank] = sender
            elif message.number == number:
                replies[next(rank for rank, peer in self._peers.items() if peer == sender)] = message

    def _interrupt(self, _: int) -> None:
        self._interrupts += 1
        self._output.ring()

    def _realign(self, replies: _Reply, left: set[int]) -> str:
        """Make ranks rendezvous again if their collectives differ after a failure; return a note about it."""
        found = list(replies.values())
        states = {done.submitted for done in found}
        is_aligned = len(states) == 1 and not left and not any(done.is_broken or done.is_loss for done in found)
        if is_aligned or states == {-1} or not any(done.error for done in found):
            return ""
        again, _ = self._gather_after(Meet, self._interrupts)
        if failed := {rank: done for rank, done in again.items() if done.error}:
            return f"\nThe ranks cannot meet again, so restart the session:\n{_report('failed', failed, self.size)}"
        return "\nThe ranks had called different collectives and have met again: make process sets anew."

    def _gather_after(self, make: Callable[[int, int], RunCell | Push | Meet], seen: int) -> tuple[_Reply, set[int]]:
        number = next(self._numbers)
        self._send(make(number, self._sent_interrupts))
        return self._gather(number, seen)

    def _death(self) -> CellError:
        why = self._ranks.why()
        self._output.show()
        self._end = f"the ranks have ended:\n{why}"
        self._release()
        return CellError(f"{self._end}\n{_GO_ON}")

    def _values(self, replies: _Reply, is_shown: bool = False) -> list[Any]:
        values: list[Any] = []
        for rank in sorted(replies):
            done, why = replies[rank], "it is too large, or cannot be pickled"
            try:
                if done.value:
                    values.append(pickle.loads(done.value))
                    continue
            except Exception as error:  # any error of the objects' own code
                why = f"{type(error).__name__}: {error}"
            if not is_shown:
                raise CellError(f"cannot have the value of rank {rank}: {why}. It is {done.text[:200]}")
            values.append(_Text(done.text) if done.text else None)
        return values


def _report(what: str, failed: Mapping[int, Done], size: int) -> str:
    """Return a report of the failed ranks: each traceback once, causes first."""
    causes: dict[tuple[str, str], list[int]] = {}
    others: dict[tuple[str, str], list[int]] = {}
    has_cause = any(not done.is_loss for done in failed.values())
    for rank in sorted(failed):
        done = failed[rank]
        (others if done.is_loss and has_cause else causes).setdefault((done.error, done.traceback), []).append(rank)
    if not failed:
        return f"the cell {what}, after it had ended on all ranks"
    lines = [f"the cell {what} on {'all ranks' if len(failed) == size > 1 else list_ranks(sorted(failed))}"]
    lines += [line for (_, trace), ranks in causes.items() for line in (f"{list_ranks(ranks)}:", trace)]
    lines += [f"{list_ranks(ranks)}: {error}" for (error, _), ranks in others.items()]
    return "\n".join(lines)
