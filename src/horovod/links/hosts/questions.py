"""Carry questions to ranks of other hosts, and their answers, from board to board."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from horovod.links.hosts.frames import Answer, Kernel, Message, Question
from horovod.links.hosts.remote_ranks import RemoteRanks
from horovod.links.shm.board import ShmBoard
from horovod.links.shm.peers import process_state

__all__ = ["Questions"]

#: How often to look at a process that owes an answer, and for how long.
_LOOK_S, _PATIENCE_S = 0.5, 10.0


@dataclass
class _Open:
    """A question of another host to a rank of this one."""

    question: Question  # the question as received
    number: int  # its number on this host's board
    since_s: float = field(default_factory=time.monotonic)  # when it came
    looked_s: float = 0.0  # when the process was last looked at


class Questions:
    """See the module. ``send`` sends messages towards the host of a rank."""

    def __init__(
        self,
        board: ShmBoard,
        remote: RemoteRanks,
        ranks: Sequence[int],
        pids: Sequence[int],
        send: Callable[[int, Sequence[Message]], None],
    ) -> None:
        self._board, self._remote, self._pids, self._send = board, remote, pids, send
        self._ranks = frozenset(ranks)
        self._asked = {rank: 0 for rank in range(len(pids)) if rank not in self._ranks}
        self._open: dict[tuple[int, int], _Open] = {}

    def news(self) -> list[Question]:
        """Return the new questions on this host's board since the last call."""
        found = []
        for rank, before in self._asked.items():
            number, wanted, asker = self._board.asked(rank)
            if number != before:
                self._asked[rank] = number
                found.append(Question(rank, asker, wanted, number))
        return found

    def look(self, questions: Sequence[Question]) -> None:
        """Pass on questions, and the answers that this host's board has now."""
        for question in questions:
            self._send(question.rank, [question])
        for key, item in list(self._open.items()):
            text = self._board.answer(item.question.rank, item.number)
            if text is not None:
                self._open.pop(key, None)
                question = item.question
                self._send(question.asker, [Answer(question.rank, question.asker, question.number, text)])
            else:
                self._tell_state(key, item)

    def take(self, message: Question | Answer | Kernel) -> None:
        """Take a message of another host: for this one, or to be passed on."""
        target = message.rank if isinstance(message, Question) else message.asker
        if target not in self._ranks:
            self._send(target, [message])
        elif isinstance(message, Question):
            number = self._board.ask(message.rank, message.wanted, message.asker)
            self._open[message.rank, message.asker] = _Open(message, number)
        elif message.rank in self._ranks:
            return
        elif isinstance(message, Answer):
            self._board.give_answer(message.number, message.text, message.rank)
        else:
            self._remote.set_kernel(message.rank, message.state, message.cpu_s)

    def _tell_state(self, key: tuple[int, int], item: _Open) -> None:
        """Send the kernel's data on a process that owes an answer, because it may be stopped."""
        clock = time.monotonic()
        if clock - item.since_s > _PATIENCE_S:
            self._open.pop(key, None)
        elif clock - item.looked_s >= _LOOK_S:
            item.looked_s = clock
            rank = item.question.rank
            self._send(item.question.asker, [Kernel(rank, item.question.asker, *process_state(self._pids[rank]))])
