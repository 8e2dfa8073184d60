"""The board: questions and answers of ranks outside the log, so also when the coordinator is stuck.

It lies behind the control page in the same memfd. Per rank of the job, those of other hosts included:

    ASK       the rank that asks this rank, and the wanted items; written by the asking rank
    ANSWER    number of the question that ANSWER_TEXT answers, 0 while it is being written
    REASON   1 when REASON_TEXT says why this rank failed
    TRACE_*   head and tail of this rank's ring of trace events, and the last recording that it has finished
    ARRIVALS  a table of when this rank submitted its latest operations, and ARRIVED, how many it noted, in a ring

and once SESSION, the recording that rank 0 makes. Each word but ASK has one writer; for a rank of another host, this
is the leader of this host. Two ranks that ask at the same moment may overwrite each other's question; the answer to
either serves both.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from horovod.engine.board import Board, TimelineSession
from horovod.transports.shm import futex
from horovod.transports.shm.control import Control
from horovod.transports.shm.mapping import map_shared

__all__ = ["ShmBoard"]

_LINE = 64
_WORDS_PER_RANK = 7
_ASK, _ANSWER, _REASON, _TRACE_HEAD, _TRACE_TAIL, _TRACE_DONE, _ARRIVED = range(_WORDS_PER_RANK)
_SESSION, _SINCE, _BEGIN, _END = range(4)
_ANSWER_BYTES = 32 << 10
_REASON_BYTES = 16 << 10
_LENGTH_BYTES = 4
_TRACE_BYTES = 1 << 20
_ARRIVALS = 8192
_RANK_BYTES = _ANSWER_BYTES + _REASON_BYTES + _TRACE_BYTES + (16 + 8) * _ARRIVALS


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _slot(key: int) -> int:
    return (key + (key >> 32)) % _ARRIVALS * 2


class ShmBoard(Board):
    """One rank's view of the board; see ``Board``. The memfd of the control page stays the caller's. ``indices`` are by
    rank of the job the index in the control page to rouse when that rank is asked.
    """

    def __init__(self, fd: int, control: Control, rank: int, indices: Sequence[int]) -> None:
        self.rank, self.size, self._control, self._indices = rank, len(indices), control, tuple(indices)
        header = _LINE + _LINE * _WORDS_PER_RANK * self.size
        length = _pages(header) + _RANK_BYTES * self.size
        self._map = map_shared(fd, length, _pages(Control.nbytes(control.size)))
        self._whole = memoryview(self._map)
        self._words = self._whole[:header].cast("Q")
        self._texts = _pages(header)
        starts = [self._text(rank + 1) - (16 + 8) * _ARRIVALS for rank in range(self.size)]
        self._arrivals = [self._whole[start : start + 16 * _ARRIVALS].cast("Q") for start in starts]
        self._recent = [self._whole[start + 16 * _ARRIVALS : start + 24 * _ARRIVALS].cast("Q") for start in starts]
        self._seen = 0

    @staticmethod
    def nbytes(local_size: int, size: int) -> int:
        """Return the bytes of a control page with a board behind it, for the ranks of this host and of the job."""
        header = _LINE + _LINE * _WORDS_PER_RANK * size
        return _pages(Control.nbytes(local_size)) + _pages(header) + _RANK_BYTES * size

    # -- questions and answers -----------------------------------------------------------------------------------

    def ask(self, rank: int, wanted: int, asker: int = -1) -> int:
        """Ask ``rank`` for items, bits of ``Query``; return the number of the question, for ``answer``."""
        asker = self.rank if asker < 0 else asker
        index = self._index(rank, _ASK)
        word = self._words[index]
        number, asked_before = word >> 24, word & 0xFF if self._words[self._index(rank, _ANSWER)] < word >> 24 else 0
        self._words[index] = (number + 1) << 24 | asker << 8 | asked_before | wanted
        self._control.rouse(self._indices[rank])
        return int(number + 1)

    def asked_by(self, rank: int) -> int:
        word = self._words[self._index(rank, _ASK)]
        return int(word >> 8 & 0xFFFF) if self._words[self._index(rank, _ANSWER)] < word >> 24 else -1

    def question(self) -> tuple[int, int, int] | None:
        word = self._words[self._index(self.rank, _ASK)]
        if word == self._seen:
            return None
        self._seen = word
        return self.asked(self.rank)

    def asked(self, rank: int) -> tuple[int, int, int]:
        """Return (number, wanted, asking rank) of the last question to ``rank``; the first one has number 1."""
        word = self._words[self._index(rank, _ASK)]
        return word >> 24, word & 0xFF, word >> 8 & 0xFFFF

    def give_answer(self, number: int, text: bytes, rank: int = -1) -> None:
        rank = self.rank if rank < 0 else rank
        self._publish(self._index(rank, _ANSWER), self._text(rank), _ANSWER_BYTES, number, text)

    def answer(self, rank: int, number: int) -> bytes | None:
        return self._read(self._index(rank, _ANSWER), self._text(rank), number)

    def give_reason(self, text: bytes, rank: int = -1) -> None:
        rank = self.rank if rank < 0 else rank
        self._publish(self._index(rank, _REASON), self._text(rank) + _ANSWER_BYTES, _REASON_BYTES, 1, text)

    def reason(self, rank: int) -> bytes | None:
        return self._read(self._index(rank, _REASON), self._text(rank) + _ANSWER_BYTES, 1)

    # -- the recording -------------------------------------------------------------------------------------------

    @property
    def session(self) -> TimelineSession:
        word = self._words[_SESSION]
        return TimelineSession(word >> 1, bool(word & 1), self._words[_SINCE], self._words[_BEGIN], self._words[_END])

    def set_session(self, session: TimelineSession) -> None:
        self._words[_SINCE], self._words[_BEGIN], self._words[_END] = session.since_ns, session.begin, session.end
        futex.fence()
        self._words[_SESSION] = session.number << 1 | session.mark_cycles

    def finish_session(self, number: int, rank: int = -1) -> None:
        futex.fence()
        self._words[self._index(self.rank if rank < 0 else rank, _TRACE_DONE)] = number

    def finished_session(self, rank: int) -> int:
        number = int(self._words[self._index(rank, _TRACE_DONE)])
        futex.fence()
        return number

    def put_trace(self, data: bytes, rank: int = -1) -> bool:
        rank = self.rank if rank < 0 else rank
        head_index = self._index(rank, _TRACE_HEAD)
        head, tail = self._words[head_index], self._words[self._index(rank, _TRACE_TAIL)]
        if len(data) > _TRACE_BYTES - (head - tail):
            return False
        area, start = self._text(rank) + _ANSWER_BYTES + _REASON_BYTES, head % _TRACE_BYTES
        cut = min(len(data), _TRACE_BYTES - start)
        self._whole[area + start : area + start + cut] = data[:cut]
        self._whole[area : area + len(data) - cut] = data[cut:]
        futex.fence()
        self._words[head_index] = head + len(data)
        return True

    def take_trace(self, rank: int) -> bytes:
        tail_index = self._index(rank, _TRACE_TAIL)
        head, tail = self._words[self._index(rank, _TRACE_HEAD)], self._words[tail_index]
        if head == tail:
            return b""
        futex.fence()
        area, start, length = self._text(rank) + _ANSWER_BYTES + _REASON_BYTES, tail % _TRACE_BYTES, head - tail
        cut = min(length, _TRACE_BYTES - start)
        data = bytes(self._whole[area + start : area + start + cut]) + bytes(self._whole[area : area + length - cut])
        futex.fence()
        self._words[tail_index] = head
        return data

    def note_arrival(self, key: int, at_ns: int, rank: int = -1) -> None:
        rank = self.rank if rank < 0 else rank
        slots, slot = self._arrivals[rank], _slot(key)
        slots[slot] = 0
        slots[slot + 1] = at_ns
        slots[slot] = key
        count = self._index(rank, _ARRIVED)
        self._recent[rank][self._words[count] % _ARRIVALS] = key
        self._words[count] += 1

    def arrived(self, rank: int, since: int) -> tuple[int, list[int]]:
        """Return how many arrivals ``rank`` has noted, and the keys of those after the first ``since`` of them."""
        count = int(self._words[self._index(rank, _ARRIVED)])
        recent = self._recent[rank]
        return count, [int(recent[index % _ARRIVALS]) for index in range(max(since, count - _ARRIVALS), count)]

    def arrival(self, rank: int, key: int) -> int:
        slots, slot = self._arrivals[rank], _slot(key)
        at_ns = slots[slot + 1] if slots[slot] == key else 0
        return int(at_ns) if slots[slot] == key else 0

    def close(self) -> None:
        for slots in (*self._arrivals, *self._recent):
            slots.release()
        self._words.release()
        self._whole.release()
        self._map.close()

    def _index(self, rank: int, word: int) -> int:
        return (_LINE + (rank * _WORDS_PER_RANK + word) * _LINE) // 8

    def _text(self, rank: int) -> int:
        return self._texts + rank * _RANK_BYTES

    def _publish(self, index: int, area: int, room: int, number: int, text: bytes) -> None:
        text = text[: room - _LENGTH_BYTES]
        self._words[index] = 0
        futex.fence()
        self._whole[area : area + _LENGTH_BYTES] = len(text).to_bytes(_LENGTH_BYTES, "little")
        self._whole[area + _LENGTH_BYTES : area + _LENGTH_BYTES + len(text)] = text
        futex.fence()
        self._words[index] = number

    def _read(self, index: int, area: int, number: int) -> bytes | None:
        before = self._words[index]
        if before < number:
            return None
        futex.fence()
        length = int.from_bytes(self._whole[area : area + _LENGTH_BYTES], "little")
        text = bytes(self._whole[area + _LENGTH_BYTES : area + _LENGTH_BYTES + length])
        futex.fence()
        return text if self._words[index] == before else None
