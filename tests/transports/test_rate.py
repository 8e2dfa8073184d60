"""How fast the network is: one answer on all members of an entry, whatever each of them has measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import run_ranks

from horovod.transports.hierarchical import rate as rates
from horovod.transports.hierarchical.rate import Rate

LARGE = 64 << 20


class _Stage:
    """Of one rank among ``shown``, the buffers of the members on its host."""

    def __init__(self, shown: list[Any], me: int) -> None:
        self.me, self._shown = me, shown

    def raw(self, member: int, round_: int, low: int, high: int) -> Any:
        return self._shown[member][low:high]

    def post(self, phase: int) -> None:
        pass

    def wait(self, phase: int) -> None:
        pass


class _Owners:
    """Owners of one slice, of which the others took ``others_ns``."""

    def __init__(self, others_ns: list[int]) -> None:
        self._others_ns = others_ns

    def gather(self, part: Any, receive: Any, counts: list[int]) -> Any:
        receive[:] = np.concatenate([part, np.array(self._others_ns, np.int64).view(np.uint8)])
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize(
    ("others_ns", "is_high"), [([10_000_000, 10_000_000], True), ([10_000_000, 900_000_000], False)]
)
def test_the_slowest_owner_of_any_host_and_slice_decides_for_all(others_ns: list[int], is_high: bool) -> None:
    shown = [np.zeros(64, np.uint8) for _ in range(3)]  # the third one of this host owns nothing
    answers = []
    for me in (0, 1, 2, 0):
        owners = _Owners([others_ns[min(me, 1)]])
        team = SimpleNamespace(
            stage=_Stage(shown, me), hosts=((0, 1, 2), (3, 4)), slots=2, is_owner=me < 2, owners=lambda o=owners: o
        )
        rate = Rate()
        rate.agree(team, 2, LARGE, 20_000_000)  # type: ignore[arg-type]
        answers.append(rate.is_high)
    # The first one looked before the second one had written.
    assert answers[1:] == [is_high] * 3


def test_members_agree_after_the_same_large_calls_only() -> None:
    rate = Rate()
    due = [rate.is_due(nbytes) for _ in range(260) for nbytes in (1 << 10, LARGE)]
    assert [index // 2 + 1 for index, is_due in enumerate(due) if is_due] == [3, 259]
    assert not any(due[::2])


def _reduce_large(high: float, hosts_in_arena: int) -> list[bool]:
    import torch

    import horovod.torch as hvd
    from horovod import context

    before, rates._HIGH = rates._HIGH, high
    try:
        tensor = (hvd if hvd.cross_rank() < hosts_in_arena else torch).empty((LARGE // 16 + 5,))
        steps = torch.arange(len(tensor)) % 1000
        found = []
        for call in range(5):
            tensor.copy_(steps * (hvd.rank() + 1) + call)
            hvd.allreduce_(tensor, op=hvd.Sum, name="large")
            found.append(bool(torch.equal(tensor, (steps * 10 + 4 * call).float())))
        transport = context.engine().transport
        return [*found, *(team.rate.is_high for team in transport._teams.values() if team.rate._calls)]
    finally:
        rates._HIGH = before


@pytest.mark.slow
@pytest.mark.parametrize(("high", "is_high"), [(0.0, True), (1e9, False)])
@pytest.mark.parametrize("hosts_in_arena", [0, 1, 2])
def test_a_large_tensor_is_reduced_in_rounds_of_either_length(high: float, is_high: bool, hosts_in_arena: int) -> None:
    assert run_ranks(4, _reduce_large, high, hosts_in_arena, hosts=(2, 2)) == [[True] * 5 + [is_high]] * 4


def _reduce_large_group(high: float) -> bool:
    import torch

    import horovod.torch as hvd

    before, rates._HIGH = rates._HIGH, high
    try:
        group = [torch.empty(LARGE // 16 + 5, dtype=dtype) for dtype in (torch.float32, torch.int32)]
        steps = torch.arange(len(group[0])) % 1000
        is_right = True
        for call in range(5):
            for tensor in group:
                tensor.copy_(steps * (hvd.rank() + 1) + call)
            hvd.grouped_allreduce_(group, op=hvd.Sum, name="group")
            is_right &= all(torch.equal(tensor, (steps * 10 + 4 * call).to(tensor.dtype)) for tensor in group)
        return is_right
    finally:
        rates._HIGH = before


@pytest.mark.slow
def test_members_agree_between_two_dtypes_of_a_group() -> None:
    # The third large stream is the first of the second call: the second one's buffers are those they agreed in.
    assert run_ranks(4, _reduce_large_group, 0.0, hosts=(3, 1)) == [True] * 4
