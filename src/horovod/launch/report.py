"""How a job went, and why it failed: the rank that failed first, then the ends of the others. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from horovod.launch.plan import LaunchPlan
from horovod.phrases import list_ranks
from horovod.rendezvous.endings import signal_name

__all__ = ["Exit", "Outcome", "alone_text", "exit_code", "report", "trains_together"]

_LONGEST_LINE = 2000
#: In a job of more ranks, those that ended alike share a line.
_LINE_EACH = 8


@dataclass(frozen=True)
class Exit:
    """How one rank ended."""

    rank: int
    pid: int
    status: int  # exit code, or minus the signal that killed it
    sent: int = 0  # the last signal that we had sent to it by then; 0 for none
    has_begun: bool = True  # whether it had called `hvd.init()`
    how: str = ""  # how it ended, in words; empty if `status` says it


@dataclass
class Outcome:
    """How the job went."""

    exits: list[Exit] = field(default_factory=list)  # in the order in which ranks ended
    interrupted: int = 0  # signal that ended the launcher; 0 for none
    tails: dict[int, list[str]] = field(default_factory=dict)  # last lines of standard error, by rank
    error: str = ""  # an error of the launcher itself, or the loss of a host before any rank failed
    lost: dict[int, str] = field(default_factory=dict)  # host of each rank whose end is unknown
    excused: set[int] = field(default_factory=set)  # ranks that failed because a host was lost
    lines: list[str] = field(default_factory=list)  # report of an elastic job
    # of an elastic job that calls a function: what the last process that failed has sent, or empty; see `launch.task`
    failed_call: bytes = b""
    code: int = 0  # exit code of the launcher after an elastic job

    @property
    def first_failure(self) -> Exit | None:
        """The first rank that failed by itself: we had sent it no signal, and no lost host excuses it."""
        return next((e for e in self.exits if e.status != 0 and not e.sent and e.rank not in self.excused), None)


def exit_code(outcome: Outcome) -> int:
    """Return the launcher's exit code: that of the first failure, 128 + n for signal n, 130 after Ctrl-C."""
    if outcome.interrupted:
        return 128 + outcome.interrupted
    first = outcome.first_failure
    if first is None:
        return 1 if outcome.error else 0
    return 128 - first.status if first.status < 0 else first.status


def report(plan: LaunchPlan, outcome: Outcome, oom_kills: int = 0) -> list[str]:
    """Return the lines of the final report; none when all went well. ``oom_kills``: how many processes the kernel
    killed for lack of memory while the job ran.
    """
    lines = [outcome.error] if outcome.error else []
    noun = plan.display.noun
    if outcome.interrupted:
        # Ranks that the kernel ended because the keeper did not answer have no exit here.
        ended = plan.size - sum(1 for e in outcome.exits if not e.sent)
        name = signal.Signals(outcome.interrupted).name
        ranks = f"{plan.size} {noun}{'s' * (plan.size != 1)}"
        return [*lines, f"{name} received; ended {ended} of {ranks}, nothing is left running"]
    first = outcome.first_failure
    if first is None:
        return lines + (_others(plan, outcome, None) if outcome.lost else [])
    where = f"{plan.host_of(first.rank)} (pid {first.pid})"
    lines.append(f"{noun} {first.rank} on {where} {_fate(first)}{_memory(first, oom_kills)}")
    tail = outcome.tails.get(first.rank, [])
    if tail:
        what = "output" if first.rank in plan.display.hidden else "stderr"
        lines.append(f"the last lines of {noun} {first.rank}'s {what}:")
        lines += [f"    {line[:_LONGEST_LINE]}{' [...]' * (len(line) > _LONGEST_LINE)}" for line in tail]
    return lines + _others(plan, outcome, first)


def trains_together(command: tuple[str, ...], size: int) -> bool:
    """Return whether a job is a Python script on several ranks; nearly all of those call ``hvd.init()``."""
    if not command:
        return False  # another system starts the processes
    name = Path(command[0]).name
    is_other = command[1:2] == ("-c",) or any(word.startswith("horovod.") for word in command)
    return size > 1 and (name.startswith("python") or name.endswith(".py")) and not is_other


def alone_text(ranks: Sequence[int], size: int, when: str = "") -> str:
    """Return a line about ranks that have not called ``hvd.init()``; ``when``, if they still run, is the period."""
    who = "no rank has" if len(ranks) == size else f"{list_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} not"
    return (
        f"{who} called hvd.init(){when}: each works alone, on all data. To train together, the script must import "
        "horovod and call hvd.init(); for Trainer and Accelerate see docs/transformers.md"
    )


def _fate(ended: Exit) -> str:
    if ended.status == 0:
        return "ended well"
    if ended.status < 0:
        return f"was killed by {signal_name(-ended.status)}"
    # A shell's exit code for a command that a signal ended.
    shell = f" ({signal_name(ended.status - 128)} in a command that it ran)" if 128 < ended.status <= 128 + 64 else ""
    return f"failed with exit code {ended.status}{shell}"


def _memory(first: Exit, oom_kills: int) -> str:
    if oom_kills <= 0 or first.status not in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return ""
    times = "once" if oom_kills == 1 else f"{oom_kills} times"
    return f", probably out of memory: the kernel killed for want of memory {times} while the job ran"


def _others(plan: LaunchPlan, outcome: Outcome, first: Exit | None) -> list[str]:
    """Return a line for each rank but the first that failed; in a large job, one for all that ended alike."""
    noun, exits, by_rank = plan.display.noun, outcome.exits, {e.rank: e for e in outcome.exits}
    lines: dict[int, str] = {}
    alike: dict[str, list[int]] = {}
    for rank in range(plan.size):
        ended = by_rank.get(rank)
        if first is not None and rank == first.rank:
            continue
        how = _end(plan, rank, ended, outcome.lost)
        if first is not None and ended is not None and exits.index(ended) < exits.index(first):
            how += f", before {noun} {first.rank} failed"
        where = f" on {plan.host_of(rank)}" * bool(plan.counts) + (f" (pid {ended.pid})" if ended else "")
        lines[rank] = f"{noun} {rank}{where}: {how}"
        alike.setdefault(how, []).append(rank)
    if plan.size <= _LINE_EACH:
        return list(lines.values())
    return [
        lines[ranks[0]] if len(ranks) == 1 else f"{list_ranks(ranks, noun)}: each {how}" for how, ranks in alike.items()
    ]


def _end(plan: LaunchPlan, rank: int, ended: Exit | None, lost: Mapping[int, str]) -> str:
    if ended is None:
        return "was lost with its host" if rank in lost else "was never started"
    if ended.sent and ended.status < 0:
        how = " after it ignored SIGTERM" if ended.status == -signal.SIGKILL and ended.sent == signal.SIGKILL else ""
        return f"ended by {plan.display.launcher} with {signal_name(-ended.status)}{how}"
    return _fate(ended)
