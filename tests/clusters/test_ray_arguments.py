"""Wrong arguments of ``horovod.ray`` are refused before anything is started."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
pytest.importorskip("ray", reason="needs: pip install khorovod[ray]")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:ray", "ignore::DeprecationWarning:ray")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_workers": 2}, "give min_workers"),
        ({"min_workers": 2, "num_workers": 2}, "give one of"),
        ({"num_hosts": 2, "num_workers": 2}, "give one of"),
        ({}, "none of them"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "use_gpu=True"),
        ({"num_workers": 2, "use_gpu": True, "gpus_per_worker": 0}, "at least 1"),
        ({"num_workers": 0}, "num_workers must be a whole number of at least 1; received 0"),
        ({"num_workers": "2"}, "num_workers must be a whole number"),
        ({"num_workers": 2, "cpus_per_worker": -1}, "CPUs of a worker must be at least 0"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers must be at least min_workers"),
        ({"min_workers": 2.5}, "min_workers must be a whole number"),
        ({"min_workers": 2, "reset_limit": -1}, "reset_limit must be a whole number of at least 0"),
        ({"min_workers": 2, "elastic_timeout": -1}, "elastic_timeout must be a number of seconds"),
        ({"min_workers": 2, "cooldown_range": (5, 1)}, r"cooldown_range must be two numbers .*received 5 1"),
        ({"min_workers": 2, "elastic_timeout": None}, "elastic_timeout must be a number of seconds"),
        ({"min_workers": 2, "cooldown_range": 3}, "cooldown_range must be two numbers"),
    ],
)
def test_wrong_arguments_are_refused(kwargs: dict[str, Any], message: str) -> None:
    from horovod.ray import RayExecutor

    with pytest.raises(ValueError, match=message):
        RayExecutor(RayExecutor.create_settings(), **kwargs)


@pytest.mark.parametrize("workers", ["num_workers", "min_workers"])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"timeout_s": -1}, "^timeout_s must be a number of seconds, at least 0; received -1"),
        ({"placement_group_timeout_s": "soon"}, "^placement_group_timeout_s must be a number of seconds"),
        ({"nics": 5}, "^nics must be names of network interfaces"),
    ],
    ids=["timeout_s", "placement_group_timeout_s", "nics"],
)
def test_wrong_settings_are_refused(setting: dict[str, Any], message: str, workers: str) -> None:
    from horovod.ray import RayExecutor

    with pytest.raises(ValueError, match=message):
        RayExecutor(RayExecutor.create_settings(**setting), **{workers: 2})


def test_elastic_executors_and_ray_train_refuse_what_ranks_could_not_use() -> None:
    from horovod.ray import ElasticRayExecutor, RayExecutor
    from horovod.ray.train import HorovodConfig

    with pytest.raises(ValueError, match="timeout_s must be"):
        ElasticRayExecutor.create_settings(timeout_s=-1)
    with pytest.raises(ValueError, match=r"there is no network interface nic7 on this host; it has .*lo"):
        RayExecutor(RayExecutor.create_settings(nics="lo,nic7"), min_workers=1).start()
    with pytest.raises(ValueError, match=r"env must map .*received \{'A': 1\}"):
        HorovodConfig(env={"A": 1})  # type: ignore[dict-item]
    assert HorovodConfig(nics="eth0,eth1").nics == ("eth0", "eth1")


def test_a_call_that_ends_after_shutdown_is_no_loss_of_the_next_job() -> None:
    from concurrent.futures import Future
    from types import SimpleNamespace

    from ray.exceptions import ActorDiedError

    from horovod.ray.settings import MiniSettings, Resources
    from horovod.ray.static import StaticAdapter

    class Worker:
        def __getattr__(self, name: str) -> Any:
            return self

        def options(self, **_: Any) -> Any:
            return SimpleNamespace(remote=lambda *_: (None, SimpleNamespace(future=lambda: end)))

    class Job:
        def ended(self, rank: int, *_: str) -> None:
            told.append(rank)

    end, told = Future[Any](), list[int]()
    adapter = StaticAdapter(MiniSettings(), Resources(), 1, 0, 1, True)
    adapter._workers, adapter._who = [Worker()], ["rank 0"]
    adapter._job = Job()  # type: ignore[assignment]
    adapter._submit(0, "call")
    adapter._job = Job()  # type: ignore[assignment] - as after shutdown() and start()
    end.set_exception(ActorDiedError())
    assert told == []
    assert adapter._lost == {}


def test_the_end_of_an_actor_is_a_part_of_a_sentence() -> None:
    from ray.exceptions import RayActorError

    from horovod.ray.failures import how_lost

    said = "The actor died unexpectedly before finishing this task.\n\tThe actor is dead because of `ray.kill`.\n"
    assert how_lost(RayActorError(error_msg=said)) == "died: The actor is dead because of `ray.kill`"


def test_an_interrupt_between_the_calls_of_two_ranks_ends_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    import ray

    from horovod.ray.settings import MiniSettings, Resources
    from horovod.ray.static import StaticAdapter

    class Worker:
        def __init__(self, interrupts: bool) -> None:
            self.call = self.call_executable = self
            self.interrupts = interrupts

        def options(self, **_: Any) -> Any:
            return self

        def remote(self, *_: Any) -> Any:
            if self.interrupts:
                raise KeyboardInterrupt
            return None, SimpleNamespace(future=lambda: SimpleNamespace(add_done_callback=lambda _: None))

    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    monkeypatch.setattr(ray, "kill", lambda worker: killed.append(worker))
    calls = [lambda adapter: adapter.run(int, (), {}, None), lambda adapter: adapter.execute(int)]
    for call in calls:
        killed = list[Any]()
        adapter = StaticAdapter(MiniSettings(), Resources(), 2, 0, 1, True)
        workers = adapter._workers = [Worker(False), Worker(True)]
        adapter._who = ["rank 0", "rank 1"]
        with pytest.raises(KeyboardInterrupt):
            call(adapter)
        assert killed == workers


def test_calls_of_two_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks run them in one order, and one that fails does not end the other."""
    from types import SimpleNamespace

    import ray

    from horovod.ray.settings import MiniSettings, Resources
    from horovod.ray.static import StaticAdapter

    class Worker:
        def __init__(self, rank: int) -> None:
            self.rank, self.call = rank, self

        def options(self, **_: Any) -> Any:
            return self

        def remote(self, call: Any, _: Any) -> Any:
            steps.append((call[0], self.rank))
            if steps == [(int, 0)]:
                other.start()
                assert met.wait(100)
            elif steps[-1] == (str, 1):
                met.set()
            return steps[-1], SimpleNamespace(future=lambda: SimpleNamespace(add_done_callback=lambda _: None))

    class Turn:
        def __enter__(self) -> None:
            if threading.current_thread() is other:
                met.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def get(refs: Any) -> None:
        if isinstance(refs, tuple):
            steps.append((refs[0], "end"))

    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get", get)
    steps, met, lock = list[tuple[Any, Any]](), threading.Event(), threading.RLock()
    adapter = StaticAdapter(MiniSettings(), Resources(), 2, 0, 1, True)
    adapter._workers, adapter._who = [Worker(0), Worker(1)], ["rank 0", "rank 1"]
    adapter._turn = Turn()  # type: ignore[assignment]
    other = threading.Thread(target=adapter.run, args=(str, (), {}, None))
    adapter.run(int, (), {}, None)
    other.join()
    assert steps == [(fn, at) for fn in (int, str) for at in (0, 1, "end", "end")]


def test_a_call_says_that_another_thread_has_called_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    import ray
    from ray.exceptions import ActorDiedError

    from horovod.errors import LaunchError
    from horovod.ray.settings import MiniSettings, Resources
    from horovod.ray.static import StaticAdapter

    def get(_: Any) -> None:
        adapter.shutdown()
        adapter._workers, adapter._job = [object()], job  # type: ignore[assignment] - as after start()
        raise ActorDiedError

    job, killed = SimpleNamespace(close=lambda: None), list[Any]()
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", killed.append)
    adapter = StaticAdapter(MiniSettings(), Resources(), 1, 0, 1, True)
    adapter._workers, adapter._who = ["worker"], ["rank 0"]
    adapter._job = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    with pytest.raises(LaunchError, match=r"the workers were ended during this call, by shutdown\(\) or Ctrl-C"):
        adapter._collect(["call"])
    assert killed == ["worker"] and adapter._lost == {}
