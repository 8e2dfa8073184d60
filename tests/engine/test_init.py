"""init() and shutdown(), any number of times; calls before, after, and from children of a rank."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import report
from harness import Ranks, on_ranks

from horovod import context
from horovod.errors import InitError, NotInitializedError


def _open() -> list[str]:
    """Return what a world could leave behind: descriptors, mappings, threads."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(path.readlink()))
        except OSError:
            continue
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted(
        [name for name in found if name.startswith(("/memfd:horovod", "socket:", "anon_inode:[pidfd]"))]
        + [line.split()[-1] for line in maps if "memfd:horovod" in line]
        + [thread.name for thread in threading.enumerate() if "horovod" in thread.name]
    )


@on_ranks(2, init=False, env={"HOROVOD_CPU_OPERATIONS": "GLOO", "HOROVOD_GLOO_IFACE": "none0"})
def test_an_init_that_fails_after_the_ranks_have_met_leaves_nothing() -> None:
    import horovod.numpy as hvd

    before = _open()
    with pytest.raises(InitError, match="none0"):
        hvd.init()
    assert _open() == before


@on_ranks(2, init=False)
def test_the_last_tensor_takes_the_arena_with_it_even_if_something_refers_to_the_engine() -> None:
    """As the traceback of a lost rank does, in a cycle that Python may not look for in hours."""
    import torch

    import horovod.torch as hvd

    before = _open()
    hvd.init()
    engine, tensor = context.engine(), hvd.zeros(100)
    for _ in range(5):
        hvd.allreduce(torch.ones(10), name="a")
    hvd.shutdown()
    assert engine is not None and _open() != before
    del tensor
    assert _open() == before


@on_ranks(2, init=False)
def test_init_inside_of_init_is_refused_and_the_outer_one_goes_on() -> None:
    import horovod.numpy as hvd
    from horovod import context

    said = []

    def detect() -> Any:
        # As from a signal handler that comes in the middle.
        context.worlds.detect = usual
        try:
            hvd.init()
        except InitError as error:
            said.append(str(error))
        hvd.shutdown()
        return usual()

    usual, context.worlds.detect = context.worlds.detect, detect
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum) == hvd.size()
    assert "init() inside of init()" in said[0]


@on_ranks(2, init=False)
def test_an_interrupted_init_has_left_and_may_be_called_again() -> None:
    import horovod.numpy as hvd
    from horovod.engine.loop import Loop

    late = []

    def start(self: Loop) -> None:
        Loop.start = usual  # type: ignore[method-assign]
        late.append(self)
        raise KeyboardInterrupt

    usual, Loop.start = Loop.start, start  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        hvd.init()
    assert not hvd.is_initialized()
    late[0]._run()  # a thread that the system lets begin now only
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum) == hvd.size()


@pytest.mark.parametrize("ranks", [1, 3])
@on_ranks(init=False)
def test_a_hundred_times(times: int = 100) -> None:
    import horovod.numpy as hvd

    before = _open()
    for i in range(times):
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        assert hvd.allreduce(np.full(3, i), op=hvd.Sum, name="x").tolist() == [i * hvd.size()] * 3
        if i % 10 == 0:
            assert hvd.size() == 1 or hvd.add_process_set([0]).process_set_id == 1
            hvd.allreduce_(hvd.zeros(100_000))
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        assert _open() == before


@on_ranks(2, init=False)
def test_shutdown_with_work_in_flight() -> None:
    import horovod.numpy as hvd

    for _ in range(3):
        hvd.init()
        # Never submitted by the others, never synchronized.
        left = hvd.allreduce_async(np.ones(10), name=f"only{hvd.rank()}")
        hvd.barrier()
        hvd.shutdown()
        with pytest.raises(NotInitializedError):
            hvd.synchronize(left)


CALLS: dict[str, Callable[[Any], Any]] = {
    "size": lambda hvd: hvd.size(),
    "rank": lambda hvd: hvd.rank(),
    "local_size": lambda hvd: hvd.local_size(),
    "local_rank": lambda hvd: hvd.local_rank(),
    "cross_size": lambda hvd: hvd.cross_size(),
    "cross_rank": lambda hvd: hvd.cross_rank(),
    "is_homogeneous": lambda hvd: hvd.is_homogeneous(),
    "allreduce": lambda hvd: hvd.allreduce(np.ones(1)),
    "allreduce_": lambda hvd: hvd.allreduce_(np.ones(1)),
    "allreduce_async": lambda hvd: hvd.allreduce_async(np.ones(1)),
    "grouped_allreduce": lambda hvd: hvd.grouped_allreduce([np.ones(1)]),
    "allgather": lambda hvd: hvd.allgather(np.ones(1)),
    "broadcast": lambda hvd: hvd.broadcast(np.ones(1), root_rank=0),
    "alltoall": lambda hvd: hvd.alltoall(np.ones(1)),
    "reducescatter": lambda hvd: hvd.reducescatter(np.ones(1)),
    "barrier": lambda hvd: hvd.barrier(),
    "join": lambda hvd: hvd.join(),
    "zeros": lambda hvd: hvd.zeros(1),
    "add_process_set": lambda hvd: hvd.add_process_set([0]),
    "start_timeline": lambda hvd: hvd.start_timeline("x"),
    "stop_timeline": lambda hvd: hvd.stop_timeline(),
    "stats": lambda hvd: hvd.stats(),
}


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks(init=False)
def test_calls_before_init_and_after_shutdown() -> None:
    import horovod.numpy as hvd

    for moment in ("before", "after"):
        assert not hvd.is_initialized()
        for name, call in CALLS.items():
            with pytest.raises(NotInitializedError) as caught:
                call(hvd)
            assert str(caught.value) == "Horovod has not been initialized; use hvd.init().", (moment, name)
            assert isinstance(caught.value, ValueError), "Horovod's scripts catch ValueError"
        hvd.init()
        hvd.shutdown()


@on_ranks(2, init=False, returns=[90_000.0] * 2)
def test_a_tensor_of_the_arena_outlives_the_world() -> float:
    import horovod.numpy as hvd

    hvd.init()
    home = hvd.zeros(5000)
    home[...] = 3.0
    hvd.allreduce_(home, op=hvd.Sum)
    hvd.shutdown()
    total = float(home.sum())
    hvd.init()
    # It lives in the arena of the former world, so it is ordinary memory now.
    hvd.allreduce_(home, op=hvd.Sum)
    hvd.shutdown()
    return total + float(home.sum())


# -- children of a rank ----------------------------------------------------------------------------------------------


def _children(method: str) -> list[list[str]]:
    import horovod.numpy as hvd

    # Work under way on either side of the fork must not suffer.
    open_ = [hvd.allreduce_async(np.full(50_000, float(i)), name=str(i), op=hvd.Sum) for i in range(5)]
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork with threads
        children = [context.Process(target=report, args=(results,)) for _ in range(2)]
        for child in children:
            child.start()
    for i, handle in enumerate(open_):
        assert (hvd.synchronize(handle) == i * hvd.size()).all()
    told = [results.get() for _ in children]
    for child in children:
        child.join()
        assert child.exitcode == 0
    for _ in range(20):
        assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    return told


def test_forked_children_know_their_rank_and_can_do_nothing_else() -> None:
    for outcome in Ranks(2, _children, ("fork",)).outcomes():
        assert outcome.error is None, outcome.text
        for who, initialized, *errors, init in outcome.value:
            assert who == f"rank {outcome.rank} of 2"
            assert initialized == "False"
            assert len(errors) == 3
            for error in errors:
                assert f"this process was forked from rank {outcome.rank} and is not a rank itself" in error
            assert init == errors[0].replace("Horovod has not been initialized", "init() in a child of a rank")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_children_are_told_whose_they_are(method: str) -> None:
    ranks = Ranks(2, _children, (method,))
    pids = [ranks.pid(rank) for rank in range(2)]
    for outcome in ranks.outcomes():
        assert outcome.error is None, outcome.text
        mine = f"this process was started by rank {outcome.rank} (pid {pids[outcome.rank]}) and is not a rank itself."
        for who, initialized, *errors, init in outcome.value:
            assert initialized == "False"
            for error in (who, *errors):
                assert error.startswith(f"Horovod has not been initialized: {mine} Call init() and collectives only in")
            assert init.startswith(f"init() in a child of a rank: {mine}")
            assert 'below `if __name__ == "__main__":`' in init
            assert "must be started without HOROVOD_RANK and HOROVOD_SIZE in its environment" in init


@on_ranks(2, init=False, returns=[["0", "2"], ["1", "2"]])
def test_a_child_may_be_a_rank_when_its_parent_is_none_any_more() -> list[str]:
    """After the rank has left, its child may take its place."""
    import horovod.numpy as hvd

    hvd.init()
    hvd.shutdown()
    script = "import horovod.numpy as hvd; hvd.init(); print(hvd.rank(), hvd.size())"
    return subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout.split()


@on_ranks(2, fresh=True, returns=[2, 2])
def test_a_forked_child_that_ends_does_not_end_the_rank() -> int:
    """A child that ends like a script, with exit handlers and all."""
    import horovod.numpy as hvd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            hvd.shutdown()
            sys.exit(7)
        finally:
            # As atexit would, without the harness's own handlers.
            from horovod import context

            context._at_exit()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    hvd.barrier()
    return int(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])


@on_ranks(2, fresh=True)
def test_programs_that_a_rank_starts_inherit_nothing_of_the_job() -> None:
    import horovod.numpy as hvd

    hvd.barrier()
    # As os.system() does: only what is marked as private stays here.
    command = ["ls", "-l", "/proc/self/fd"]
    inherited = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, close_fds=False).stdout
    assert " 0 -> " in inherited
    for word in ("memfd", "pidfd", "socket"):
        assert word not in inherited
