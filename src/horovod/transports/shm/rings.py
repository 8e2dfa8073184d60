"""Rings of records in shared memory: one writer, one or many readers, no lock.

A record is a header word ``type << 24 | words`` followed by its 32-bit words; it never wraps (the writer
pads to the end of the ring instead). Positions count words since the beginning and only grow. Long byte
strings travel as several records, of which all but the last are marked as continued.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Sequence

from horovod.transports.shm import futex

__all__ = ["RecordReader", "RecordWriter", "bytes_of"]

_PAD = 0xFF
_CONTINUED = 0x80
_LENGTH = 0xFFFFFF
#: Pack and unpack short records in one step; most records are short.
_SHORT = [struct.Struct(f"={count}I") for count in range(16)]


class RecordWriter:
    """The writing end. ``head`` is the index of the head in ``words64``, written here; ``tails`` are those of every
    reader's tail.
    """

    def __init__(self, ring: memoryview, words64: memoryview, head: int, tails: Sequence[int]) -> None:
        self._ring = ring
        self._capacity = len(ring)
        self._words64 = words64
        self._head = head
        self._tails = tails
        self._position: int = words64[head]
        self._limit = self._position + self._capacity
        # records that wait for a slow reader
        self.backlog: collections.deque[tuple[int, Sequence[int]]] = collections.deque()

    def put(self, kind: int, words: Sequence[int]) -> bool:
        """Append a record; False when it waits in the backlog because a reader is far behind."""
        if self.backlog:
            self.backlog.append((kind, words))
            return False
        count = len(words) + 1
        position, capacity, ring = self._position, self._capacity, self._ring
        start = position % capacity
        pad = capacity - start if start + count > capacity else 0
        if position + pad + count > self._limit:
            self._limit = min([self._words64[tail] for tail in self._tails], default=position) + capacity
            if position + pad + count > self._limit:
                self.backlog.append((kind, words))
                return False
        if pad:
            ring[start] = _PAD << 24 | pad
            position += pad
            start = 0
        if count < len(_SHORT):
            _SHORT[count].pack_into(ring, start * 4, kind << 24 | count, *words)
        else:
            ring[start] = kind << 24 | count
            for word in words:
                start += 1
                ring[start] = word
        self._position = position + count
        if not futex.is_strongly_ordered:
            futex.fence()
        self._words64[self._head] = self._position
        return True

    def put_bytes(self, kind: int, prefix: Sequence[int], data: bytes) -> bool:
        """Append a record of ``prefix`` words, the length of ``data`` and ``data``, in pieces if it is long."""
        padded = data + bytes(-len(data) % 4)
        words = [*prefix, len(data), *memoryview(padded).cast("I")]
        piece = self._capacity // 4
        done = True
        for start in range(0, len(words), piece):
            last = start + piece >= len(words)
            done = self.put(kind if last else kind | _CONTINUED, words[start : start + piece])
        return done

    def flush(self) -> bool:
        """Write the records in the backlog, as far as there is room; return whether the backlog is empty."""
        waiting, self.backlog = self.backlog, collections.deque()
        while waiting and self.put(*waiting[0]):
            waiting.popleft()
        self.backlog = waiting
        return not waiting

    def forget(self, tail: int) -> None:
        """Stop waiting for the reader with this tail."""
        self._tails = [other for other in self._tails if other != tail]


class RecordReader:
    """One reading end; see ``RecordWriter``."""

    def __init__(self, ring: memoryview, words64: memoryview, head: int, tail: int) -> None:
        self._ring = ring
        self._capacity = len(ring)
        self._words64 = words64
        self._head = head
        self._tail = tail
        self._position: int = words64[tail]
        self._parts: list[int] = []

    def has_more(self) -> bool:
        """Whether a record is there to be read."""
        return bool(self._words64[self._head] != self._position)

    def get(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the next record as (kind, words), or None."""
        ring, words64, position = self._ring, self._words64, self._position
        while words64[self._head] != position:
            if not futex.is_strongly_ordered:
                futex.fence()
            start = position % self._capacity
            header = ring[start]
            kind, count = header >> 24, header & _LENGTH
            if count <= len(_SHORT):
                words = _SHORT[count - 1].unpack_from(ring, start * 4 + 4)
            else:
                words = tuple(ring[start + 1 : start + count]) if kind != _PAD else ()
            if not futex.is_strongly_ordered:
                futex.fence()
            words64[self._tail] = self._position = position = position + count
            if kind == _PAD:
                continue
            if kind & _CONTINUED:
                self._parts += words
                continue
            if self._parts:
                words = (*self._parts, *words)
                self._parts = []
            return kind, words
        return None


def bytes_of(words: Sequence[int], start: int) -> bytes:
    """Return the byte string that ``put_bytes`` placed behind ``start`` prefix words."""
    length = words[start]
    return b"".join(word.to_bytes(4, "little") for word in words[start + 1 :])[:length]
