"""A job service with a policy: events of the launcher and words of processes go in, decisions and answers come out."""

from __future__ import annotations

import secrets
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from horovod.core.membership_events import (
    Assign,
    Begin,
    Decision,
    Discovered,
    Dissolve,
    Ended,
    Finish,
    Policy,
    Silent,
    Slot,
    Start,
    Tick,
    TrainingOver,
)
from horovod.errors import DismissedError, InitError
from horovod.rendezvous import curve, membership_client
from horovod.rendezvous.client import FateQuery, JobStore
from horovod.rendezvous.generations import Generations
from horovod.rendezvous.keys import SERVICE, local_name, purpose_key
from horovod.rendezvous.membership_client import MembershipClient, Superseded
from horovod.rendezvous.protocol import MemberNews, MemberPlace, MemberStatus, pack
from horovod.rendezvous.service import Service

KEY = secrets.token_bytes(32)
KILLED = "was killed by SIGKILL"
LONG_S = 60.0


class Member(MembershipClient):
    """A fake rank in this process: a client that may stand for any process.

    Args:
        service: of its job.
        slot: host and number.
    """

    def __init__(self, service: Service, slot: tuple[str, int]) -> None:
        membership_client._nonce.cache_clear()
        self.lost: list[tuple[int, str]] = []
        super().__init__(service.endpoints, KEY, slot, LONG_S, lambda rank, how: self.lost.append((rank, how)))


class Job:
    """A service, and its members by slot number of one host."""

    def __init__(self, policy: Policy, count: int) -> None:
        self.service = Service(KEY, [local_name(KEY, f"job {secrets.token_hex(4)}")], policy=policy)
        self.members: dict[int, Member] = {}
        self._seen: list[Decision] = []
        self.service.put(Discovered({"a": count}))
        self.decided(lambda d: isinstance(d, Start) and d.slot.number == count - 1)

    def decided(self, is_it: Callable[[Decision], bool]) -> Decision:
        """Wait for a decision, as a launcher does; each is found once."""
        while True:
            for index, decision in enumerate(self._seen):
                if is_it(decision):
                    del self._seen[: index + 1]
                    return decision
            assert select.select([self.service], [], [], LONG_S)[0], f"only {self._seen}"
            self._seen += self.service.take()

    def come(self, *numbers: int) -> None:
        """Let processes call ``init()``."""
        for number in numbers:
            self.members[number] = Member(self.service, ("a", number))

    def ready(self, *numbers: int, progress: int = 0) -> None:
        """Let members wait for their places."""
        for number in numbers:
            self.members[number].ready(progress, "x")

    def begin(self, *numbers: int) -> list[MemberPlace]:
        """Let members have met each other; return their places."""
        places = [self.members[number].await_place() for number in numbers]
        threads = [
            threading.Thread(target=self.members[number].joined, args=(place,))
            for number, place in zip(numbers, places, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        return places

    def end(self, number: int, how: str) -> None:
        """Let a process end, as its keeper reports it."""
        member = self.members.pop(number)
        member._news = MemberNews("a", number, bytes(16), 0)  # a dead process says nothing
        member.close()
        self.service.put(Ended(Slot("a", number), how))

    def close(self) -> None:
        """Close everything."""
        for member in self.members.values():
            member.close()
        self.service.close()


@pytest.fixture
def make_job() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(policy: Policy, count: int) -> Job:
        made.append(Job(policy, count))
        return made[-1]

    yield make
    for job in made:
        job.close()


ELASTIC = Policy(3)


def test_the_launcher_gets_decisions_about_what_it_has_put(make_job: Callable[..., Job]) -> None:
    job = make_job(Policy(2, spares=1), 3)
    for number in range(3):
        job.service.put(Ended(Slot("a", number), KILLED))
    finish = job.decided(lambda d: isinstance(d, Finish))
    assert isinstance(finish, Finish) and KILLED in finish.why
    assert job.service.take() == [] and not select.select([job.service], [], [], 0)[0]


def test_members_get_places_and_the_generation_begins_when_all_have_joined(make_job: Callable[..., Job]) -> None:
    job = make_job(ELASTIC, 3)
    job.come(0, 1, 2)
    assert job.members[0].status.size == 3 and not job.members[0].status.begun
    job.ready(2, 1, progress=7)
    job.ready(0, progress=9)
    job.decided(lambda d: isinstance(d, Assign))
    places = job.begin(0, 1, 2)
    assert [(p.rank, p.size, p.local_rank, p.local_size, p.behind) for p in places] == [
        (0, 3, 0, 3, [1, 2]), (1, 3, 1, 3, [1, 2]), (2, 3, 2, 3, [1, 2]),
    ]  # fmt: skip
    assert job.decided(lambda d: isinstance(d, Begin)) == Begin(1, 9)
    assert job.service.progress == 9
    assert not any(member.wants_change for member in job.members.values())


def test_a_death_calls_the_meeting_off_and_gives_other_places(make_job: Callable[..., Job]) -> None:
    job = make_job(ELASTIC, 3)
    job.come(0, 1, 2)
    job.ready(0, 1, 2)
    old = [job.members[number].await_place() for number in (0, 1, 2)]
    errors: list[BaseException] = []

    def join() -> None:
        try:
            job.members[1].joined(old[1])
        except Superseded as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    job.end(0, KILLED)
    job.decided(lambda d: isinstance(d, Dissolve))
    thread.join(LONG_S)
    assert len(errors) == 1
    _await(lambda: job.members[2].status.placed != 1)
    places = job.begin(1, 2)
    assert [(p.generation, p.rank, p.size, p.previous) for p in places] == [(2, 0, 2, [-1, -1]), (2, 1, 2, [-1, -1])]
    for member, place in zip((job.members[1], job.members[2]), old[1:], strict=True):
        with pytest.raises(Superseded):
            member.check(place)  # although the member has another place


def test_the_end_of_a_rank_is_known_by_its_generation(make_job: Callable[..., Job]) -> None:
    job = make_job(ELASTIC, 3)
    job.come(0, 1, 2)
    job.ready(0, 1, 2)
    job.begin(0, 1, 2)
    job.end(0, KILLED)
    for number in (1, 2):
        _await(lambda number=number: job.members[number].lost == [(0, KILLED)])  # type: ignore[misc]
    job.ready(1, 2)
    assert [place.previous for place in job.begin(1, 2)] == [[1, 2], [1, 2]]
    for rank, generation, how in ((0, 1, KILLED), (1, 1, ""), (0, 2, ""), (5, 1, ""), (0, 99, "")):
        assert job.service._generations.fate(rank, generation).how == how
    query = FateQuery(job.service.endpoints, KEY, 0, 1)
    while not (told := query.news()):
        pass
    query.close()
    assert told == KILLED


def test_a_newcomer_and_a_member_that_leaves_make_the_others_want_a_change(make_job: Callable[..., Job]) -> None:
    job = make_job(Policy(2, maximum=3), 3)
    job.come(0, 1)
    job.ready(0, 1)
    job.begin(0, 1)
    job.come(2)
    assert job.members[2].status.begun == 1 and job.members[2].status.size == 2
    job.ready(2)
    for number in (0, 1):
        _await(lambda number=number: job.members[number].wants_change)  # type: ignore[misc]
    job.ready(0, 1, progress=1)
    assert [place.previous for place in job.begin(0, 1, 2)] == [[0, 1, -1]] * 3
    assert not job.members[0].wants_change
    job.members[1].leave()
    _await(lambda: job.members[0].wants_change and job.members[2].wants_change)
    job.ready(0, 1, 2, progress=2)
    with pytest.raises(DismissedError, match="asked to leave"):
        job.members[1].await_place()
    assert [place.previous for place in job.begin(0, 2)] == [[0, 2]] * 2


def test_a_second_process_in_a_slot_is_refused_and_a_dead_one_is_not_heard(make_job: Callable[..., Job]) -> None:
    job = make_job(Policy(1, cool_down_s=(0, 0)), 1)
    job.come(0)
    job.ready(0)
    job.begin(0)
    with pytest.raises(InitError, match="another process"):
        Member(job.service, ("a", 0))
    with pytest.raises(InitError, match="none was started"):
        Member(job.service, ("b", 0))


def test_a_thread_that_waits_for_a_place_ends_when_its_process_leaves_the_job(make_job: Callable[..., Job]) -> None:
    job = make_job(Policy(2), 2)
    job.come(0)
    job.ready(0)
    closing = threading.Thread(target=job.members[0].close)
    closing.start()
    with pytest.raises(InitError, match="has left its job"):
        job.members[0].await_place()
    closing.join(LONG_S)


def test_last_words_of_a_dead_process_are_not_those_of_its_successor() -> None:
    generations, slot = Generations(Policy(2, cool_down_s=(1, 1))), Slot("a", 0)
    generations.handle(Discovered({"a": 1}))
    old, new = (MemberNews("a", 0, nonce * 16, 7) for nonce in (b"o", b"n"))
    assert len(generations.hear(b"old", old)) == 1
    generations.handle(Ended(slot, KILLED))
    generations.handle(Tick(0.0))
    generations.handle(Tick(2.0))
    assert [d for d in generations.take() if isinstance(d, Start)] == [Start(slot)] * 2
    assert generations.hear(b"old", old) == []
    ((sender, answer),) = generations.hear(b"new", new)
    assert sender == b"new" and isinstance(answer, MemberStatus)


def test_a_place_that_was_lost_is_said_again_also_to_one_that_had_joined() -> None:
    generations = Generations(Policy(2, minimum=1))
    generations.handle(Discovered({"a": 2}))
    for number in (0, 1):
        generations.hear(b"%d" % number, MemberNews("a", number, b"%d" % number * 16, 7))
        generations.hear(b"%d" % number, MemberNews("a", number, b"%d" % number * 16, 7, "ready", 1))
    joined = MemberNews("a", 0, b"0" * 16, 7, "joined", 1, 1)
    generations.hear(b"0", joined)
    generations.handle(Ended(Slot("a", 1), KILLED))  # its answers are lost
    places = [answer for _, answer in generations.hear(b"0", joined) if isinstance(answer, MemberPlace)]
    assert [(place.attempt, place.generation, place.size) for place in places] == [(1, 2, 1)]


def test_the_launcher_is_told_of_a_silent_process_unless_it_has_left_or_the_service_itself_stood_still() -> None:
    generations = Generations(Policy(3))
    generations.handle(Discovered({"a": 3}))
    for number, verb in enumerate(("here", "left", "here")):
        generations.hear(b"", MemberNews("a", number, b"%d" % number * 16, 70 + number, verb))  # type: ignore[arg-type]
    silent: list[tuple[Slot, int]] = []
    for now_s in (0.0, 100.0, 101.0, 102.0, 103.0, 104.0, 105.0):
        generations.hear(b"", MemberNews("a", 2, b"2" * 16, 72))
        generations.handle(Tick(now_s))
        silent += [(d.slot, d.pid) for d in generations.take() if isinstance(d, Silent)]
        assert bool(silent) == (now_s >= 104.0)
    assert silent == [(Slot("a", 0), 70)] * 2


def test_a_job_that_is_not_elastic_says_so() -> None:
    service = Service(KEY, [local_name(KEY, "plain job")])
    with pytest.raises(InitError, match="not started elastically"):
        Member(service, ("a", 0))
    with pytest.raises(ValueError, match="policy"):
        service.put(Discovered({"a": 1}))
    service.close()


def test_a_member_hears_that_the_service_has_gone(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_client, "_BEAT_S", 0.02)
    job = make_job(Policy(1), 1)
    job.come(0)
    job.ready(0)
    job.begin(0)
    job.service.close()
    member = job.members[0]
    _await(lambda: bool(member.lost))
    assert member.lost[0][0] == -1
    with pytest.raises(InitError, match=r"the job service at ipc://\S+ has not answered"):
        member.ready(0, "")
        member.await_place()


def test_a_stranger_gets_no_answer_and_changes_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job(Policy(1), 1)
    context: zmq.Context[Any] = zmq.Context()
    for key in (purpose_key(b"another secret", SERVICE), purpose_key(KEY, "another purpose")):
        with curve.client_socket(context, key) as stranger:
            stranger.immediate = False
            stranger.connect(job.service.endpoints[0])
            stranger.send(pack(MemberNews("a", 0, bytes(16), 1)))
            stranger.send(pack(MemberNews("a", 0, bytes(16), 1, verb="ready", attempt=1)))
            assert not stranger.poll(300)
    context.destroy()
    assert job.service.take() == []


@pytest.mark.parametrize(
    "news",
    [
        MemberNews("a" * 2000, 0, bytes(16), 1),
        MemberNews("a", -1, bytes(16), 1),
        MemberNews("a", 0, bytes(3), 1),
        MemberNews("a", 0, bytes(16), 1, verb="dance"),  # type: ignore[arg-type]
        MemberNews("a", 0, bytes(16), 1, digest="x" * 2000),
    ],
)
def test_a_message_that_does_not_fit_its_type_is_dropped(make_job: Callable[..., Job], news: MemberNews) -> None:
    job = make_job(Policy(1), 1)
    context: zmq.Context[Any] = zmq.Context()
    sender = curve.client_socket(context, purpose_key(KEY, SERVICE))
    sender.connect(job.service.endpoints[0])
    sender.poll(int(LONG_S * 1000), zmq.POLLOUT)
    sender.send(pack(news))
    sender.send(pack(MemberNews("a", 0, bytes(16), 1)))
    assert sender.poll(int(LONG_S * 1000)) and sender.recv()  # the answer to the second one
    assert not sender.poll(50)
    context.destroy()


def test_the_table_forgets_generations_that_are_over(make_job: Callable[..., Job]) -> None:
    job = make_job(Policy(1), 1)
    store = JobStore(KEY, lambda: job.service.endpoints, timeout_s=LONG_S)
    store.set("/1/a", b"old")
    store.set("other", b"kept")
    with pytest.raises(TimeoutError):
        store.get("/1/never", timeout_s=0.01)
    job.come(0)
    for _ in range(10):
        job.ready(0)
        job.begin(0)
    job.decided(lambda d: isinstance(d, Begin) and d.generation == 10)
    assert not store.check("/1/a") and store.get("other") == b"kept"
    assert not job.service._parked
    store.close()


def _await(is_so: Callable[[], bool]) -> None:
    """Wait for what the thread of a client hears."""
    pause = threading.Event()
    for _ in range(int(LONG_S / 0.01)):
        if is_so():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come")


def test_a_process_learns_that_the_job_may_have_several_hosts(make_job: Callable[..., Job]) -> None:
    job = make_job(ELASTIC, 2)
    job.come(0)
    assert not job.members[0].status.may_spread
    job.service.put(Discovered({"a": 2, "b": 1}))
    job.come(1)
    assert job.members[1].status.may_spread
    script = make_job(Policy(3, is_discovering=True), 1)
    script.come(0)
    assert script.members[0].status.may_spread


def test_the_last_steps_count_also_of_a_process_that_leaves_at_once(make_job: Callable[..., Job]) -> None:
    job = make_job(ELASTIC, 3)
    job.come(0, 1, 2)
    job.ready(0, 1, 2)
    job.begin(0, 1, 2)
    job.members[0].done(7)
    _await(lambda: job.service.progress == 7)
    assert job.decided(lambda d: isinstance(d, Begin)) == Begin(1, 0)  # read late
    assert job.decided(lambda d: isinstance(d, TrainingOver)) == TrainingOver(1)
    job.members[1].done(9)
    job.members.pop(1).close()
    _await(lambda: job.service.progress == 9)
