"""Ends of processes that another launcher has started, and their causes."""

from __future__ import annotations

import pytest

from horovod.core.membership_events import Gone, Policy, Silent, Slot
from horovod.rendezvous.generations import Generations, Watches
from horovod.rendezvous.protocol import MemberNews, WatchNews


@pytest.mark.parametrize("is_host_lost", [False, True])
def test_a_silent_process_was_stopped_only_if_the_watch_of_its_host_has_found_it_so(is_host_lost: bool) -> None:
    generations = Generations(Policy(2, is_open=True))
    watches, slot = Watches(generations), Slot("a", 0)
    generations.hear(b"0", MemberNews("a", 0, b"0" * 16, 7))
    watches.hear(b"watch", WatchNews("a", []))
    watches.order(Silent(slot, 7, "it was stopped"))
    for now_s in range(9 * is_host_lost):
        watches.tick(float(now_s))
    if not is_host_lost:
        watches.hear(b"watch", WatchNews("a", [0]))
    (gone,) = (decision for decision in generations.take() if isinstance(decision, Gone))
    how = "was lost with its host, which has not answered for 6 s" if is_host_lost else "was killed: it was stopped"
    assert gone == Gone(slot, 7, how)
