"""Rings of records: whatever is written arrives, once, in order, at every reader, however slow."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.transports.shm.rings import RecordReader, RecordWriter, bytes_of

randoms = st.randoms(use_true_random=False)
words = st.lists(st.integers(0, 0xFFFFFFFF), max_size=6)
records = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 5), words),
        st.tuples(st.integers(1, 5), words, st.binary(max_size=300)),
    ),
    max_size=40,
)


@dataclass
class Pipe:
    """A ring of ``capacity`` words with its ends, in private memory."""

    capacity: int
    readers: int
    writer: RecordWriter = field(init=False)
    ends: list[RecordReader] = field(init=False)

    def __post_init__(self) -> None:
        self.ring = memoryview(bytearray(4 * self.capacity)).cast("I")
        self.words64 = memoryview(bytearray(8 * (self.readers + 1))).cast("Q")
        tails = range(1, self.readers + 1)
        self.writer = RecordWriter(self.ring, self.words64, 0, list(tails))
        self.ends = [RecordReader(self.ring, self.words64, 0, tail) for tail in tails]


def _put(pipe: Pipe, record: tuple[object, ...]) -> bool:
    if len(record) == 2:
        return pipe.writer.put(*record)  # type: ignore[arg-type]
    return pipe.writer.put_bytes(*record)  # type: ignore[arg-type]


def _decode(record: tuple[int, tuple[int, ...]], like: tuple[object, ...]) -> tuple[object, ...]:
    kind, found = record[0], list(record[1])
    if len(like) == 2:
        return kind, found
    prefix = like[1]
    assert isinstance(prefix, list)
    return kind, found[: len(prefix)], bytes_of(found, len(prefix))


@settings(max_examples=150)
@given(plan=records, capacity=st.sampled_from([16, 17, 64, 1024]), readers=st.integers(1, 3), rng=randoms)
def test_every_record_arrives_intact(
    plan: list[tuple[object, ...]], capacity: int, readers: int, rng: random.Random
) -> None:
    pipe = Pipe(capacity, readers)
    received: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(readers)]
    unsent = list(plan)
    while unsent or pipe.writer.backlog or any(end.has_more() for end in pipe.ends):
        action = rng.randrange(readers + 2)
        if action < readers:
            record = pipe.ends[action].get()
            if record is not None:
                received[action].append(record)
        elif action == readers and unsent:
            _put(pipe, unsent.pop(0))
        else:
            assert pipe.writer.flush() is not bool(pipe.writer.backlog)
    for found in received:
        assert [_decode(record, like) for record, like in zip(found, plan, strict=True)] == plan
    assert [end.get() for end in pipe.ends] == [None] * readers


def test_a_full_ring_keeps_records_back_until_the_slowest_reader_has_read() -> None:
    pipe = Pipe(16, 2)
    sent = 0
    while pipe.writer.put(1, (sent,)):
        sent += 1
    assert sent == 8
    assert pipe.writer.backlog
    fast, slow = pipe.ends
    for i in range(8):
        assert fast.get() == (1, (i,))
    assert not pipe.writer.flush()
    assert fast.get() is None
    assert slow.get() == (1, (0,))
    assert pipe.writer.flush()
    assert not pipe.writer.backlog
    assert fast.get() == (1, (8,))


def test_a_reader_that_is_gone_can_be_forgotten() -> None:
    pipe = Pipe(16, 2)
    while pipe.writer.put(1, (0,)):
        pipe.ends[0].get()
    assert not pipe.writer.flush()
    pipe.writer.forget(2)
    assert pipe.writer.flush()
    for i in range(100):
        assert pipe.ends[0].get() is not None
        assert pipe.writer.put(1, (i,))


def test_what_comes_behind_a_backlog_does_not_overtake_it() -> None:
    pipe = Pipe(16, 1)
    while pipe.writer.put(1, (0,) * 6):
        pass
    assert not pipe.writer.put(2, ())
    kinds = []
    while record := pipe.ends[0].get():
        kinds.append(record[0])
        pipe.writer.flush()
    assert kinds == [1, 1, 1, 2]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 4000])
def test_long_byte_strings_travel_in_pieces(length: int) -> None:
    pipe = Pipe(64, 1)
    data = bytes(i % 251 for i in range(length))
    pipe.writer.put_bytes(3, (11, 12), data)
    while (record := pipe.ends[0].get()) is None:
        pipe.writer.flush()
    kind, found = record
    assert (kind, found[:2], bytes_of(found, 2)) == (3, (11, 12), data)
    assert pipe.ends[0].get() is None


def test_an_end_that_comes_later_goes_on_where_the_words_say() -> None:
    pipe = Pipe(64, 1)
    pipe.writer.put(1, (1,))
    pipe.writer.put(1, (2,))
    assert pipe.ends[0].get() == (1, (1,))
    again = RecordReader(pipe.ring, pipe.words64, 0, 1)
    assert again.get() == (1, (2,))
    RecordWriter(pipe.ring, pipe.words64, 0, [1]).put(1, (3,))
    assert again.get() == (1, (3,))
