"""The program of a rank of a notebook's session: runs the cells that the kernel sends, in one namespace."""

from __future__ import annotations

import ast
import linecache
import os
import signal
import sys
import traceback
import types
from typing import Any

import cloudpickle
import msgspec
import zmq

from horovod import config, context
from horovod.bindings import process_sets
from horovod.errors import PeerLostError
from horovod.notebook import messages
from horovod.notebook.messages import Done, Hello, LeaveRanks, Meet, Push, RunCell, Stop
from horovod.phrases import printable
from horovod.rendezvous.client import connect_first
from horovod.rendezvous.keys import purpose_key
from horovod.rendezvous.waiting import Patience
from horovod.tracebacks import shorten
from horovod.world import detect

__all__ = ["CellRunner", "main"]

_LONGEST_TEXT = 1 << 16


class CellRunner:
    """Executes the kernel's messages until Stop."""

    def __init__(self, socket: zmq.Socket[bytes], rank: int) -> None:
        self._socket, self._rank = socket, rank
        self._pid = os.getpid()
        self._is_running = False
        self._interrupts = 0  # that the kernel has sent, as far as is known here
        self._failure: BaseException | None = None
        # Keep copies, because cells may close or replace descriptors 1 and 2.
        self._streams = {number: os.dup(number) for number in (1, 2)}
        module = types.ModuleType("__main__")  # pickle and multiprocessing look names up there
        sys.modules["__main__"] = module
        self._names: dict[str, Any] = module.__dict__

    def serve(self) -> None:
        """Execute messages, and block until Stop."""
        self._hear_interrupts()
        decoder: msgspec.msgpack.Decoder[messages.ToRank] = msgspec.msgpack.Decoder(messages.ToRank)
        self._socket.send(msgspec.msgpack.encode(Hello(self._rank)))
        while True:
            message = decoder.decode(self._socket.recv())
            if isinstance(message, Stop):
                return
            if isinstance(message, LeaveRanks):
                self._leave()
            else:
                done = self._carry_out(message)
                self._end_output(message.number)
                self._socket.send(msgspec.msgpack.encode(done))

    def _hear_interrupts(self) -> None:
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        if self._is_running:
            self._is_running = False
            raise KeyboardInterrupt
        self._interrupts += 1

    def _carry_out(self, message: RunCell | Push | Meet) -> Done:
        data, text = b"", ""
        self._failure = None
        try:
            try:
                self._is_running = True  # from here on an interrupt reaches the cell
                known, self._interrupts = self._interrupts, message.interrupts
                if known > message.interrupts:  # one that is meant for this message came before it
                    self._interrupt()
                if isinstance(message, RunCell):
                    value = self._evaluate(message.source, message.name)
                    if message.wants_all or (self._rank == 0 and value is not None):
                        data, text = _packed(value, message.most_bytes)
                elif isinstance(message, Push):
                    self._names.update(cloudpickle.loads(message.data))
                else:
                    process_sets.shutdown()
                    process_sets.init()
            finally:
                self._is_running = False
                self._hear_interrupts()  # the cell may have set another handler
        except BaseException as error:
            self._failure = error
        if os.getpid() != self._pid:
            self._end_forked()
        submitted, is_broken = -1, False
        if context.is_initialized():
            engine = context.engine()
            stats = engine.stats()
            submitted, is_broken = stats.operations, stats.in_flight > 0 or engine.failure is not None
        if self._failure is None:
            return Done(message.number, data, text, submitted=submitted, is_broken=is_broken)
        summary, trace = _described(self._failure)
        is_loss = isinstance(self._failure, PeerLostError)
        return Done(message.number, b"", "", summary, trace, is_loss, submitted, is_broken)

    def _end_forked(self) -> None:
        """End a process that a cell has forked, with a script's exit codes; its copy of the socket is of no use."""
        status: Any = int(self._failure is not None)
        if isinstance(self._failure, SystemExit) and isinstance(self._failure.code, int | None):
            status = self._failure.code or 0
        elif self._failure is not None:
            sys.stderr.write(f"{_described(self._failure)[1]}\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status & 0xFF)

    def _evaluate(self, source: str, name: str) -> Any:
        """Run a cell; return the value of its last expression, or None."""
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), self._names)
        if not isinstance(last, ast.Expr):
            return None
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), self._names)
        if value is not None:
            self._names["_"] = value
        return value

    def _leave(self) -> None:
        try:
            if self._failure is not None:
                raise self._failure  # so that the other ranks learn the cause
        except BaseException:
            process_sets.shutdown()

    def _end_output(self, number: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass  # the cell has closed or replaced the stream
        for stream, fd in self._streams.items():
            os.write(fd, messages.end_mark(number, self._rank, stream))


def _packed(value: Any, most_bytes: int) -> tuple[bytes, str]:
    try:
        text = repr(value)[:_LONGEST_TEXT]
    except Exception as error:  # any error of the object's own code
        text = f"<{type(value).__name__}, whose repr raised {type(error).__name__}: {error}>"
    try:
        data = bytes(cloudpickle.dumps(value))
    except Exception:  # any error of the object's own code
        data = b""
    return data if len(data) <= most_bytes else b"", printable(text)


def _described(error: BaseException) -> tuple[str, str]:
    """Return type and message in one line, and the traceback without frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    shorten(error.with_traceback(trace))
    summary = traceback.format_exception_only(error)[-1].strip()
    return printable(summary), printable("".join(traceback.format_exception(error)).rstrip())


def main() -> int:
    """Run the process; return 0 when the kernel has ended the session."""
    endpoints = os.environ.pop(messages.CELLS_VARIABLE).split(",")
    world = detect()
    patience = Patience(config.load().start_timeout_s, lambda: None)
    connections: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        key, nobody = purpose_key(world.key, messages.CELLS), "the notebook's kernel does not answer"
        socket, _ = connect_first(connections, key, lambda: endpoints, patience, nobody, messages.MOST_BYTES)
        CellRunner(socket, world.rank).serve()
    finally:
        connections.destroy()
    return 0


if __name__ == "__main__":
    # Import under the real name, so that frames of this module are recognized.
    from horovod.notebook import cells

    sys.exit(cells.main())
