"""Inline messages: two or three ranks in one process, one after the other."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from horovod.core.requests import NO_NOTE, Kind, ReduceOp, Request, Response, TensorSpec
from horovod.transports.base import Entry, Work
from horovod.transports.shm.arena import INLINE_BYTES, ROTATION_BYTES, STAGING_BYTES, Arena
from horovod.transports.shm.control import Control
from horovod.transports.shm.mapping import create_memfd
from horovod.transports.shm.transport import ShmTransport, inline_limit

Array = np.ndarray[Any, Any]
LIMIT = inline_limit(3, Kind.ALLREDUCE)
FRONT = INLINE_BYTES + STAGING_BYTES + 4096


class NumpyWork(Work, eq=False):
    """A work that allocates numpy arrays."""

    def allocate(self, index: int, shape: tuple[int, ...]) -> Array:
        if index == len(self.outputs):
            self.outputs = [*self.outputs, np.empty(shape, self.inputs[index].dtype)]
        return self.outputs[index]  # type: ignore[no-any-return]


def _work(inputs: Sequence[Array], outputs: Sequence[Array] = ()) -> NumpyWork:
    return NumpyWork("numpy", list(inputs), list(outputs))


class Host:
    """The transports of all ranks of a host, in one process; nobody ever waits."""

    is_alarmed = False

    def __init__(self, size: int) -> None:
        control = create_memfd("horovod-test", Control.nbytes(size))
        arenas = [create_memfd("horovod-test", FRONT) for _ in range(size)]
        self.ranks = [
            ShmTransport(Control(control, rank, size), [Arena(fd, FRONT) for fd in arenas], self)
            for rank in range(size)
        ]
        for fd in (control, *arenas):
            os.close(fd)

    def check(self, rank: int, waited_s: float) -> None:
        raise AssertionError(f"somebody waits for rank {rank}")

    def offer(self, rank: int, work: NumpyWork, kind: Kind = Kind.ALLREDUCE, **how: Any) -> int:
        transport = self.ranks[rank]
        inline = transport.inline("numpy", _request(kind, work, **how), len(self.ranks))
        return NO_NOTE if inline is None else transport.offer(work, inline)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host(3)
    yield host
    host.close()


def _request(kind: Kind, work: NumpyWork, **how: Any) -> Request:
    return Request("a", kind, tensors=tuple(TensorSpec(str(a.dtype), a.shape) for a in work.inputs), **how)


def _response(kind: Kind, works: Sequence[NumpyWork], **how: Any) -> Response:
    requests = [_request(kind, work, **how) for work in works]
    return Response(kind, "a", 0, tuple(range(len(works))), len(works), tuple(requests))


def test_only_allreduces_that_are_computed_alike_have_a_class_in_common(host: Host) -> None:
    transport, floats = host.ranks[0], TensorSpec("float32", (4,))
    alike = Request("a", Kind.ALLREDUCE, tensors=(floats,))
    others = [
        Request("b", Kind.ALLREDUCE, tensors=(TensorSpec("float64", (4,)),)),
        Request("b", Kind.ALLREDUCE, tensors=(floats,), op=ReduceOp.MAX),
        Request("b", Kind.ALLREDUCE, tensors=(floats,), prescale=0.5),
    ]
    alone = [
        Request("b", Kind.ALLREDUCE, tensors=(floats, TensorSpec("int32", (4,)))),
        Request("b", Kind.ALLREDUCE, tensors=(floats,), op=ReduceOp.ADASUM),
        Request("b", Kind.ALLREDUCE, tensors=(floats,), device="cuda:0"),
        Request("b", Kind.ALLREDUCE, tensors=(floats,), placement=(4096,)),
        Request("b", Kind.BROADCAST, tensors=(floats,)),
    ]
    assert transport.fuse_class(alike) == transport.fuse_class(Request("b", Kind.ALLREDUCE, tensors=(floats, floats)))
    assert len({"", *(transport.fuse_class(request) for request in [alike, *others])}) == 5
    assert {transport.fuse_class(request) for request in alone} == {""}


def test_large_data_does_not_ride(host: Host) -> None:
    assert host.offer(0, _work([np.empty(LIMIT, "uint8")])) == 0
    assert host.offer(0, _work([np.empty(LIMIT + 1, "uint8")])) == NO_NOTE


def _fill(host: Host) -> list[NumpyWork]:
    """Let rank 0 offer until it is turned away."""
    works = []
    while True:
        work = _work([np.empty(LIMIT, "uint8")])
        if host.offer(0, work) == NO_NOTE:
            return works
        works.append(work)


def test_a_full_ring_turns_data_away_until_everybody_has_read(host: Host) -> None:
    works = _fill(host)
    assert len(works) >= 7
    for work in works:
        host.ranks[0].skip(work)
    assert len(_fill(host)) == len(works)


def test_places_come_free_in_the_order_in_which_they_were_taken(host: Host) -> None:
    first, second, *_ = _fill(host)
    host.ranks[0].skip(second)
    assert not _fill(host)
    host.ranks[0].skip(first)
    assert len(_fill(host)) == 2


def test_places_change_so_that_none_is_still_in_its_readers_cache(host: Host) -> None:
    tokens = set()
    for _ in range(1000):
        work = _work([np.empty(LIMIT, "uint8")])
        tokens.add(host.offer(0, work))
        host.ranks[0].skip(work)
    assert tokens == set(range(0, ROTATION_BYTES, LIMIT))


def test_many_at_once_ride_although_the_first_are_read_meanwhile(host: Host) -> None:
    works = []
    for turn in range(200):
        work = _work([np.empty(LIMIT // 64, "uint8")])
        assert host.offer(0, work) != NO_NOTE, f"the {turn}-th was turned away"
        works.append(work)
        if turn % 2:
            host.ranks[0].skip(works[turn // 2])


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_overwritten_before_the_slowest_rank_has_read_it(seed: int) -> None:
    """Ranks submit far ahead and execute the log at their own pace."""
    rng = random.Random(seed)
    host = Host(2)
    count, shapes = 40, [rng.choice([1, 1000, 512 << 7]) for _ in range(40)]
    works = [[_work([np.full(shape, float(i * 2 + rank))]) for i, shape in enumerate(shapes)] for rank in range(2)]
    tokens: list[list[int]] = [[], []]
    executed = [0, 0]
    while min(executed) < count:
        rank = rng.choice([0, 0, 0, 1]) if executed[0] // 10 % 2 == 0 else rng.choice([0, 1, 1, 1])
        mine, theirs = len(tokens[rank]), len(tokens[1 - rank])
        i = executed[rank]
        if i == min(mine, theirs) or rng.random() < 0.3:
            if mine < count:
                tokens[rank].append(host.offer(rank, works[rank][mine]))
        else:
            both = (tokens[0][i], tokens[1][i])
            executed[rank] += 1
            work = works[rank][i]
            if NO_NOTE in both:
                host.ranks[rank].skip(work)
                continue
            response = _response(Kind.ALLREDUCE, [works[0][i], works[1][i]])
            host.ranks[rank].run(i + 1, [(Entry(response, rank), work)], both)
            np.testing.assert_array_equal(work.outputs[0], np.full(shapes[i], i * 4.0 + 1))
    host.close()
