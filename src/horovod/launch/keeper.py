"""The process between the launcher and the ranks: starts them, reaps them, and never leaves one behind.

It is a process of its own so that ranks end even when the launcher is killed: it holds one end of a socket pair, and
when the other end closes it kills everything below it. It is the "subreaper" of all descendants of the ranks, so it
finds a rank's data loaders, shells and daemons even if they change their session or environment. If the keeper itself
is killed, the kernel kills the ranks, and their descendants become children of the keeper's parent, a *guard* that
waits for nothing else. If the guard is killed, the keeper ends the job. If both are killed at once, the launcher ends
all processes that have the name of the job in their environment.

It runs from this file alone, ``python -I -S keeper.py CONTROL_FD PLAN_FD``: standard library only, so that it starts in
20 ms, and no import of the package, so that only this file decides whether processes end.

    launcher to keeper   T end all (SIGTERM, then SIGKILL), K kill all, S stop all, C continue all, (closed) kill all,
                         U, V, I pass SIGUSR1, SIGUSR2, SIGINT on to ranks that handle it, F leave once nothing runs;
                         JSON: {"start": r, "slot": n, "env": {...}, "stdin": bool}, with the descriptors of its output,
                         its error and other descriptors to inherit; {"kill": r}
    keeper to launcher   JSON: {"ended": r, "pid": p, "status": s, "sent": n}, {"passed_on": [ranks]},
                         {"error": "..."}, {"done": true}

A rank is identified by the launcher's number of its process, which is unique in the job. Its slot is its place on this
host; another process may get the slot later.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable
from typing import Any, NoReturn

__all__ = ["KILL_KEEPER", "OWN_SIGNALS", "Keeper", "catches", "descendants", "main"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PIDFD_OPEN = 434  # the same number on all machines; a Python built for an older system has no function for it
_SWEEP_PATIENCE_S = 1.0  # time for a rank's leftovers to end by themselves, such as multiprocessing's resource tracker
_KILL_AGAIN_S = 0.1
_LOOK_S = 0.02
# A process that the kernel has not ended by then is stuck in a driver. Count tries, too: on a busy machine this process
# may not run for a long time.
_GIVE_UP_S, _GIVE_UP_TRIES = 2.0, 50
_EXIT = struct.Struct("<iiii")  # a row of the table of exits, as in rendezvous.endings; its last number is the rank's
_LONGEST_ORDER, _MOST_FDS = 1 << 18, 8
_FIRST_FD = 3  # first descriptor that a rank inherits besides its output
#: Tells the guard to kill the keeper. A scheduler may send any of the other signals to all processes of a job.
KILL_KEEPER = signal.SIGRTMAX
_PASSED_ON = {b"U": signal.SIGUSR1, b"V": signal.SIGUSR2, b"I": signal.SIGINT}
OWN_SIGNALS = (*_PASSED_ON.values(), signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, KILL_KEEPER)


def descendants(*roots: int, session: int = 0) -> list[int]:
    """Return the ids of all living processes below ``roots``, or only of those in a session, nearest first."""
    children: dict[int, list[int]] = {}
    sessions: dict[int, int] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - os is faster here, and this scan is repeated
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent, _, own_session = file.read().rpartition(b")")[2].split()[:4]
            except (OSError, ValueError):
                continue  # ended meanwhile
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
                sessions[int(entry)] = int(own_session)
    found: list[int] = []
    level = [*roots]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return [pid for pid in found if sessions[pid] == session] if session else found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; most signals kill a process without one."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = [line.split()[1] for line in file if line.startswith(b"SigCgt:")]
    except OSError:
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def _signal(number: int, pids: Iterable[int]) -> bool:
    """Send processes a signal, and return whether one was reached."""
    is_reached = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ended meanwhile, or became another user
            os.kill(pid, number)
            is_reached = True
    return is_reached


class Keeper:
    """Starts and ends ranks on orders of the launcher.

    Args:
        control: socket to the launcher.
        guard: end of a pipe that closes when the guard is gone; -1 for none.
        plan: ``command``, ``env``, ``grace_s``, and ``exits``, a pair: descriptor of the table that shows ranks, by
            slot, how others have ended, and the environment variable that holds its path.
    """

    def __init__(self, control: socket.socket, plan: dict[str, Any], guard: int = -1) -> None:
        self._control = control
        self._guard = guard
        self._plan = plan
        self._libc = ctypes.CDLL(None)
        self._running: dict[int, tuple[int, int]] = {}  # pid -> rank and slot
        self._is_open = True  # more ranks may have to be started
        self._deserted: dict[int, float] = {}  # session of a failed rank -> when to kill its remaining processes
        self._pidfds: dict[int, int] = {}  # pidfd -> pid
        self._epoll = select.epoll()
        self._deadline: float | None = None
        self._sent = 0  # last signal that we sent to all
        self._is_alone = False  # the guard was killed
        self._exits: int = plan["exits"][0] if plan else -1  # memory that processes of this user can open

    def run(self) -> None:
        """Start ranks, and stay until all of their processes have ended. Blocks for as long as the job runs."""
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wake, wake_end = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        self._epoll.register(wake, select.EPOLLIN)
        self._epoll.register(self._control, select.EPOLLIN)
        if self._guard >= 0:
            self._epoll.register(self._guard, select.EPOLLIN)
        try:
            while self._running or self._is_open:
                self._step(wake)
        except Exception as error:
            self._say({"error": f"{type(error).__name__}: {error}"})
            self._kill()
        finally:
            self._sweep(wake)
            self._say({"done": True})

    def _start(self, order: dict[str, Any], fds: list[int]) -> None:
        if not self._is_open:
            return  # the job is being ended
        rank, slot = order["start"], order["slot"]
        signal.pthread_sigmask(signal.SIG_BLOCK, OWN_SIGNALS)  # they wait until the child ignores them no more
        pid = os.fork()
        if pid == 0:
            self._become(order, fds)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._running[pid] = rank, slot
        self._write_down(slot, pid, 0, 0)
        # An old kernel refuses: then SIGCHLD reports deaths, but not the order of simultaneous ones.
        if (pidfd := self._libc.syscall(_PIDFD_OPEN, pid, 0)) >= 0:
            self._pidfds[pidfd] = pid
            self._epoll.register(pidfd, select.EPOLLIN | select.EPOLLONESHOT)

    def _become(self, order: dict[str, Any], fds: list[int]) -> NoReturn:
        """Turn the forked child into the rank."""
        command = self._plan["command"]
        try:
            parent = os.getppid()
            os.setsid()  # the terminal's Ctrl-C is for the launcher
            self._libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)  # the keeper died in between
            for number in (*OWN_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            if not order["stdin"]:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(fds[0], 1)
            os.dup2(fds[1], 2)
            own_fds = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD + _MOST_FDS) for fd in fds[2:]]
            for place, fd in enumerate(own_fds, _FIRST_FD):
                os.dup2(fd, place)
            # This comes last: MPICH's Hydra loses the last variable on the way to another host, where it is of no use.
            own = {self._plan["exits"][1]: f"/proc/{parent}/fd/{self._exits}"}
            os.execvpe(command[0], command, {**self._plan["env"], **order["env"], **own})
        except OSError as error:
            os.write(2, f"horovodrun: cannot run {command[0]!r}: {error.strerror}\n".encode())
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)
        except BaseException:
            os._exit(1)

    def _step(self, wake: int) -> None:
        """Wait for events and handle them."""
        times = [t for t in (self._deadline, *self._deserted.values()) if t is not None]
        timeout = max(0.0, min(times) - time.monotonic()) if times else -1.0
        # epoll hands events out in the order in which they happened: the first death comes first.
        for fd, _ in self._epoll.poll(timeout):
            if fd == wake:
                os.read(wake, 4096)
            elif fd == self._control.fileno():
                self._obey()
            elif fd == self._guard:
                self._is_alone = True
                self._epoll.unregister(fd)
                self._kill()
            else:
                pid = self._pidfds.pop(fd)
                os.close(fd)
                self._reap(pid)
        while self._reap(0):
            pass
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._kill()
        for session in [session for session, at in self._deserted.items() if time.monotonic() >= at]:
            del self._deserted[session]
            _signal(signal.SIGKILL, descendants(os.getpid(), session=session))

    def _obey(self) -> None:
        fds: list[int] = []
        try:
            order, fds, *_ = socket.recv_fds(self._control, _LONGEST_ORDER, _MOST_FDS)
            for fd in fds:
                os.set_inheritable(fd, False)  # each rank gets its own and no other
            if order.startswith(b"{"):
                about = json.loads(order)
                if "start" in about:
                    self._start(about, fds)
                else:
                    _signal(signal.SIGKILL, [pid for pid, (rank, _) in self._running.items() if rank == about["kill"]])
                return
        except ConnectionError:
            order = b""
        finally:
            for fd in fds:
                os.close(fd)
        self._is_open &= order in (b"S", b"C", *_PASSED_ON)
        if order == b"T":
            if self._deadline is None:
                self._deadline = time.monotonic() + self._plan["grace_s"]
            self._sent = self._sent or signal.SIGTERM
            workers = self._workers()
            _signal(signal.SIGTERM, [pid for pid in descendants(os.getpid()) if pid not in workers])
            self._signal_all(signal.SIGCONT)
        elif order in (b"S", b"C"):
            self._signal_all(signal.SIGSTOP if order == b"S" else signal.SIGCONT)
        elif order in _PASSED_ON:
            self._pass_on(_PASSED_ON[order])
        elif order != b"F":  # K, or the launcher is gone
            if not order:
                self._epoll.unregister(self._control)
            self._kill()

    def _kill(self) -> None:
        self._is_open = False
        self._sent = signal.SIGKILL
        self._signal_all(signal.SIGKILL)
        self._deadline = time.monotonic() + _KILL_AGAIN_S

    def _signal_all(self, *numbers: int) -> None:
        pids = descendants(os.getpid())
        for number in numbers:
            _signal(number, pids)

    def _workers(self) -> set[int]:
        """Return processes, as a DataLoader's, that run the program of their rank, which handles SIGTERM itself."""
        roots = [root for root in self._running if catches(root, signal.SIGTERM)]
        programs = {os.path.realpath(f"/proc/{root}/exe") for root in roots}
        return {pid for pid in descendants(*roots) if os.path.realpath(f"/proc/{pid}/exe") in programs}

    def _pass_on(self, number: int) -> None:
        """Send each rank a signal: to its own process, or to the nearest one below it that handles the signal."""
        reached = []
        for root, (rank, _) in self._running.items():
            listeners = [root] if catches(root, number) else [pid for pid in descendants(root) if catches(pid, number)]
            if _signal(number, listeners[:1]):
                reached.append(rank)
        if number != signal.SIGINT:
            self._say({"passed_on": reached})

    def _reap(self, pid: int) -> bool:
        """Reap one dead child, process ``pid`` or (0) any, and report it if it was a rank."""
        try:
            result = os.waitid(os.P_PID if pid else os.P_ALL, pid, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return False
        if result is None:
            return False
        ended = self._running.pop(result.si_pid, None)
        if ended is not None:
            rank, slot = ended
            status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            self._write_down(slot, result.si_pid, 1, status)
            self._say({"ended": rank, "pid": result.si_pid, "status": status, "sent": int(self._sent)})
            if status and self._is_open and (left := descendants(os.getpid(), session=result.si_pid)):
                # The job goes on and may reuse the slot: end the processes that this one has left.
                _signal(signal.SIGTERM, left)
                self._deserted[result.si_pid] = time.monotonic() + _SWEEP_PATIENCE_S
        return True

    def _write_down(self, slot: int, pid: int, has_ended: int, status: int) -> None:
        os.pwrite(self._exits, _EXIT.pack(pid, has_ended, status, 0)[: 16 - 4 * has_ended], slot * _EXIT.size)

    def _sweep(self, wake: int) -> None:
        """End the processes that the ranks left behind."""
        if not descendants(os.getpid()):
            return
        now = time.monotonic()
        deadline = now if self._sent == signal.SIGKILL else min(self._deadline or now + 9, now + _SWEEP_PATIENCE_S)
        self._signal_all(signal.SIGTERM, signal.SIGCONT)
        tries = 0
        while descendants(os.getpid()) and (tries < _GIVE_UP_TRIES or time.monotonic() < deadline + _GIVE_UP_S):
            if time.monotonic() >= deadline:
                self._signal_all(signal.SIGKILL)
                tries += 1
            select.select([wake], [], [], _LOOK_S)
            try:
                os.read(wake, 4096)
            except BlockingIOError:
                pass
            while self._reap(0):
                pass

    def _say(self, event: dict[str, Any]) -> None:
        if self._is_alone:
            return  # the launcher must learn only that we are gone, when all is over
        with contextlib.suppress(OSError):  # the launcher is gone; _obey sees it
            self._control.send(json.dumps(event).encode())


def _guard(keeper: int, alive: int, ended: int, control: int) -> NoReturn:
    """Wait for the keeper's end, then kill its remaining descendants; only a killed keeper leaves any. The keeper
    watches ``alive``; ``ended`` closes with the keeper. Only the keeper reads from ``control``.
    """
    signal.signal(KILL_KEEPER, lambda *_: os.kill(keeper, signal.SIGKILL))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the output of the ranks ends with the ranks
        if int(name) > 2 and int(name) not in (alive, ended, control):
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor of the listing itself
    watch = select.poll()
    watch.register(ended, 0)
    watch.register(control, 0)  # reports only that the other end was closed
    if any(fd == control for fd, _ in watch.poll()):
        watch.unregister(control)
        os.kill(keeper, signal.SIGCONT)  # the keeper kills the job now; who kills it first must live until the end
        if not watch.poll(_GIVE_UP_S * 1000):
            os.kill(keeper, signal.SIGKILL)
    os.close(control)
    os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOWAIT)  # not reaped yet, so its id is not reused
    signal.signal(KILL_KEEPER, signal.SIG_IGN)
    for _ in range(_GIVE_UP_TRIES):
        left = descendants(os.getpid())
        _signal(signal.SIGKILL, left)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if not left:
            break
        time.sleep(_LOOK_S)
    os._exit(0)


def main() -> None:
    """Entry point of guard and keeper."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in OWN_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    control_fd, plan_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(plan_fd, "rb") as file:
        plan = json.loads(file.read())
    for fd in (control_fd, plan["exits"][0]):
        os.set_inheritable(fd, False)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
    guard, alive = os.pipe()
    ended, living = os.pipe()
    keeper = os.fork()
    if keeper:
        os.close(living)
        _guard(keeper, alive, ended, control_fd)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
    os.close(alive)
    os.close(ended)
    os.setsid()  # a signal to the guard's group must not hit both
    Keeper(socket.socket(fileno=control_fd), plan, guard).run()


if __name__ == "__main__":
    main()
