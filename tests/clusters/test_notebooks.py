"""Notebooks in real kernels: ranks that live between cells, and what becomes of them when something goes wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import namespaces
import pytest
from namespaces import Cluster

nbformat = pytest.importorskip("nbformat", reason="needs: pip install khorovod[clusters]")
nbclient = pytest.importorskip("nbclient", reason="needs: pip install khorovod[clusters]")

EXAMPLES = Path(__file__).parents[2] / "examples"

START = "import horovod\nsession = horovod.interactive(np=2)"
IMPORTS = "%%hvd\nimport os, sys, time\nimport numpy as np\nimport horovod.numpy as hvd\nhvd.init()"

IN_A_THREAD = """\
import os, threading, time
failures = []
def elsewhere():
    try:
        session.execute("hvd.rank() or open(PATH, 'w'); time.sleep(1000)")
    except Exception as error:
        failures.append(repr(error))
thread = threading.Thread(target=elsewhere)
thread.start()
while not os.path.exists(PATH):
    time.sleep(0.02)
session.close()
thread.join()
os.remove(PATH)
failures
"""

COUNTED = """\
import contextlib, time
class Counted(list):
    write, flushes = list.append, 0
    def flush(self):
        self.flushes += 1
out, begin = Counted(), time.monotonic()
with contextlib.redirect_stdout(out):
    session.execute("for n in range(2000):\\n    print(n, flush=True)\\n    time.sleep(0.0005)")
lines = ''.join(out).splitlines()
passed = time.monotonic() - begin
[[line for line in lines if line.startswith(f'[{rank}]')] == [f'[{rank}] {n}' for n in range(2000)] for rank in (0, 1)]
"""

SENT = """\
import os, signal
send = session._send
def sent_and_interrupted(*words):
    send(*words)
    session._send = send
    os.kill(os.getpid(), signal.SIGINT)
session._send = sent_and_interrupted
session.execute("time.sleep(1000)")
"""


class Kernel:
    """A notebook that grows cell by cell, in a kernel of its own.

    Args:
        client: of nbclient.
        folder: for marks that ranks leave.
    """

    def __init__(self, client: Any, folder: Path) -> None:
        self.client, self.folder = client, folder

    async def run(self, source: str, meanwhile: Callable[[], Awaitable[None]] | None = None) -> Any:
        """Run a cell as the front end does, and return it; ``meanwhile`` runs when the cell has left a mark."""
        cell = nbformat.v4.new_code_cell(source.replace("MARK", f"open({str(self.folder / 'mark')!r}, 'w')"))
        self.client.nb.cells.append(cell)
        number = len(self.client.nb.cells) - 1
        task = asyncio.ensure_future(self.client.async_execute_cell(cell, number, store_history=True))
        if meanwhile is not None:
            mark = self.folder / "mark"
            while not mark.exists():
                assert not task.done(), cell.outputs
                await asyncio.sleep(0.02)
            mark.unlink()
            await meanwhile()
        await task
        return cell

    async def interrupt(self) -> None:
        """Press the stop button."""
        await self.client.km.interrupt_kernel()

    async def value(self, source: str) -> Any:
        """The value of a cell that yields plain data."""
        return eval(result(await self.run(source)))


def result(cell: Any) -> str:
    """The text of a cell's result."""
    assert not errors(cell), errors(cell)
    return next(str(o.data["text/plain"]) for o in cell.outputs if o.output_type == "execute_result")


def errors(cell: Any) -> str:
    """The error that a cell shows; empty when there was none."""
    return "\n".join(line for o in cell.outputs if o.output_type == "error" for line in o.traceback)


def stream(cell: Any, name: str = "stdout") -> str:
    """The output that a cell shows."""
    return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == name)


def play(script: Callable[[Kernel], Awaitable[None]], folder: Path) -> None:
    """Run a script in a new kernel, which ends with it."""

    async def whole() -> None:
        client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=300, allow_errors=True)
        async with client.async_setup_kernel():
            await script(Kernel(client, folder))

    asyncio.run(whole())


async def gone(pids: list[int]) -> None:
    """Wait until none of these processes runs."""
    deadline = time.monotonic() + 60
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < deadline, f"{alive} are left"
        await asyncio.sleep(0.05)


def test_cells_share_a_namespace_show_output_and_survive_errors_and_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_DEADLOCK_CHECK_TIME_SECONDS", "1")
    play(_ordinary, tmp_path)


async def _ordinary(kernel: Kernel) -> None:
    early = await kernel.run("%%hvd\n1")
    assert "hvd" in errors(early) + stream(early, "stderr")
    assert not errors(await kernel.run(START))
    assert not errors(await kernel.run(IMPORTS))
    pids = await kernel.value('session.pull("os.getpid()")')
    kernel_pid = await kernel.value("import os\nos.getpid()")
    assert len({kernel_pid, *pids}) == 3

    # Output is whole lines with the rank, on its own stream, in order, and all of it is there when the cell ends.
    cell = await kernel.run(
        "%%hvd\nfor i in range(300):\n    print(f'line {i} of {hvd.rank()}')\n"
        "print('problem', hvd.rank(), file=sys.stderr)\nprint('no end', end='')\nseen = hvd.rank()\n"
        "hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)"
    )
    assert result(cell) == "array([3., 3., 3.])"
    for rank in (0, 1):
        own = [line for line in stream(cell).splitlines() if line.startswith(f"[{rank}] ")]
        assert own == [*(f"[{rank}] line {i} of {rank}" for i in range(300)), f"[{rank}] no end"]
    assert len(stream(cell).splitlines()) == 602
    assert sorted(stream(cell, "stderr").splitlines()) == ["[0] problem 0", "[1] problem 1"]

    # Rank 0's last value is the result, `_` and Out; variables of earlier cells are those of each rank.
    assert await kernel.value("_.tolist()") == [3.0, 3.0, 3.0]
    assert await kernel.value("%%hvd\n[seen, float(_.sum()), __name__]") == [0, 9.0, "__main__"]
    assert await kernel.value('session.pull("seen")') == [0, 1]
    assert [o.output_type for o in (await kernel.run("%%hvd\nseen;")).outputs] == []
    assert "locked" in result(await kernel.run("%%hvd\nimport threading\nthreading.Lock()"))  # shown, though not sent

    # Much output comes in few parts: a kernel sends each as a message, and drops some of a flood.
    assert await kernel.value(COUNTED) == [True, True]
    assert await kernel.value("out.flushes < 10 + 100 * passed")

    # Functions and values of the kernel travel.
    await kernel.run(
        "def scaled(x):\n    return factor * x\nfactor = 10\nsession.push(scaled=scaled, variables=[1, 2])"
    )
    assert await kernel.value("%%hvd\n[scaled(x) for x in variables]") == [10, 20]
    assert "cannot send lock" in errors(await kernel.run("import threading\nsession.push(lock=threading.Lock())"))
    assert "rank 0" in errors(await kernel.run("session.pull('threading.Lock()')"))
    told = errors(await kernel.run("%%hvd\nfor x in"))
    assert told.splitlines()[-1] == "SyntaxError: invalid syntax" and ", in " not in told, told
    told = errors(await kernel.run("%%hvd\nraise OSError('no ' + os.fsdecode(b'caf\\xe9'))"))
    assert "ranks 0, 1:" in told and r"OSError: no caf\udce9" in told
    # A process that a cell has forked ends with it, and only the rank answers.
    for body, code in (("1 / 0", 1), ("sys.exit(3)", 3), ("pass", 0)):
        cell = await kernel.run(f"%%hvd\nif not (child := os.fork()):\n    {body}\nchild and os.wait()[1] >> 8")
        assert (result(cell), "ZeroDivisionError" in stream(cell, "stderr")) == (str(code), body == "1 / 0")

    # One rank fails while the other waits for it: both are named, and they go on together.
    cell = await kernel.run(
        "%%hvd\nif hvd.rank() == 1:\n    raise ValueError('no data here')\nhvd.allreduce(np.ones(2), name='g')"
    )
    shown = errors(cell)
    assert shown.index("rank 1:\n") < shown.index("line 3") < shown.index("ValueError: no data here")
    assert "rank 0: horovod.errors.PeerLostError: rank 1" in shown and "have met again" in shown
    assert f"In[{cell.execution_count}]" in shown and "session.py" not in shown
    assert await kernel.value("%%hvd\nhvd.allreduce(np.ones(2), op=hvd.Sum).tolist()") == [2.0, 2.0]
    assert await kernel.value('session.pull("(seen, os.getpid())")') == [(0, pids[0]), (1, pids[1])]

    # Ranks that disagree: one error for both.
    shown = errors(await kernel.run("%%hvd\nhvd.allreduce(np.ones(2 + hvd.rank()), name='h')"))
    assert shown.count("MismatchError") == 1 and "ranks 0, 1:" in shown and "rank 1: [3]" in shown
    assert await kernel.value("%%hvd\nhvd.allreduce(np.ones(2), op=hvd.Sum).tolist()") == [2.0, 2.0]

    # Ranks that wait for each other.
    shown = errors(await kernel.run("%%hvd\nhvd.allreduce(np.ones(2), name=f'of {hvd.rank()}')"))
    assert "DeadlockError" in shown and "have met again" in shown
    assert await kernel.value("%%hvd\nhvd.allreduce(np.ones(2), op=hvd.Sum).tolist()") == [2.0, 2.0]

    # The stop button, in Python and in a collective that one rank never calls; ranks hear it once they run the cell.
    for body in ("MARK\n    while True: time.sleep(0.01)", "MARK; hvd.allreduce(np.ones(2), name='late')"):
        body = f"%%hvd\nhvd.barrier()\nif hvd.rank() == 0:\n    {body}\nelse:\n    time.sleep(1000)"
        cell = await kernel.run(body, kernel.interrupt)
        assert "KeyboardInterrupt: the cell was interrupted on all ranks" in errors(cell), errors(cell)
        assert await kernel.value("%%hvd\nhvd.allreduce(np.ones(2), op=hvd.Sum).tolist()") == [2.0, 2.0]

    # A rank that has ended its cell does not hear it in the next one; a signal that is faster than its cell counts for
    # it; and a handler that a cell has set, as Lightning does, ends with that cell.
    cell = await kernel.run("%%hvd\nMARK if hvd.rank() == 0 else time.sleep(1000)", kernel.interrupt)
    assert "KeyboardInterrupt: the cell was interrupted on " in errors(cell), errors(cell)
    assert await kernel.value("%%hvd\nhvd.allreduce(np.ones(2), op=hvd.Sum).tolist()") == [2.0, 2.0]
    faster = f"import signal\nfor pid in {pids}:\n    os.kill(pid, signal.SIGINT)\nsession.execute('time.sleep(1000)')"
    assert "ranks 0, 1:\nKeyboardInterrupt" in errors(await kernel.run(faster))
    await kernel.run("%%hvd\nimport signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)")
    cell = await kernel.run("%%hvd\nhvd.rank() or MARK\ntime.sleep(1000)", kernel.interrupt)
    assert "KeyboardInterrupt: the cell was interrupted on all ranks" in errors(cell), errors(cell)
    assert await kernel.value('session.pull("os.getpid()")') == pids
    assert await kernel.value("import os\nos.getpid()") == kernel_pid

    # The stop button while a cell is sent.
    assert "KeyboardInterrupt: the cell was interrupted on all ranks" in errors(await kernel.run(SENT))
    assert await kernel.value("%%hvd\nhvd.allreduce(np.ones(2), op=hvd.Sum).tolist()") == [2.0, 2.0]


def test_lost_ranks_and_lost_kernels_leave_nothing_behind(tmp_path: Path) -> None:
    play(_losses, tmp_path)


async def _losses(kernel: Kernel) -> None:
    async def ranks(again: str = START) -> list[int]:
        assert not errors(await kernel.run(again))
        assert not errors(await kernel.run(IMPORTS))
        return await kernel.value("%%hvd\nhvd.allgather_object(os.getpid())")

    # A rank dies in a cell: it is named, the others are ended, the kernel goes on and says how to start again.
    pids = await ranks()
    cell = await kernel.run(
        f"%%hvd\nif hvd.rank() == 1:\n    os.kill(os.getpid(), {int(signal.SIGKILL)})\nhvd.allreduce(np.ones(2))"
    )
    assert f"(pid {pids[1]}) was killed by SIGKILL" in errors(cell)
    await gone(pids)
    for source in ("%%hvd\n1", 'session.pull("seen")'):
        shown = errors(await kernel.run(source))
        assert "was killed by SIGKILL" in shown and "session.restart(), or horovod.interactive() as before" in shown

    # It dies between cells; and one that hears no interrupt is ended by the second.
    pids = await ranks("session.restart()")
    os.kill(pids[0], signal.SIGKILL)
    await gone(pids)
    assert f"(pid {pids[0]}) was killed by SIGKILL" in errors(await kernel.run("%%hvd\n1"))
    pids = await ranks(START)

    async def twice() -> None:
        await kernel.interrupt()
        while not (kernel.folder / "mark").exists():
            await asyncio.sleep(0.02)
        (kernel.folder / "mark").unlink()
        await kernel.interrupt()

    # One rank marks, whenever an interrupt is sure to leave it in the loop: a late mark would be taken for another one.
    cell = await kernel.run(
        "%%hvd\nwhile True:\n    try:\n        if hvd.rank() == 0:\n            MARK\n        time.sleep(1000)\n"
        "    except KeyboardInterrupt:\n        pass",
        twice,
    )
    assert "a second interrupt, or close(), ended all" in errors(cell), errors(cell)
    await gone(pids)

    # A thread waits for a cell when the session is closed; and new ranks that cannot start leave it closed.
    pids = await ranks(START)
    cell = await kernel.run(IN_A_THREAD.replace("PATH", repr(str(kernel.folder / "mark"))))
    assert "have ended" in result(cell) and "a second interrupt, or close(), ended all" in result(cell)
    await gone(pids)
    pids = await ranks("session.restart()")
    assert "received 0" in errors(await kernel.run("horovod.interactive(np=0)"))
    assert "the session was closed" in errors(await kernel.run("%%hvd\n1"))
    await gone(pids)

    # A session that is restarted is the one of `%%hvd` again, and the only one.
    pids = await ranks("later = horovod.interactive(np=1)")
    await kernel.run("session.restart()")
    await gone(pids)
    assert await kernel.value("%%hvd\nimport os\nint(os.environ['HOROVOD_SIZE'])") == 2
    assert "the session was closed" in errors(await kernel.run("later.pull('1')"))
    await kernel.run("session.close()")

    # `horovod.run` in the same kernel, with the stop button.
    job = "import horovod, time, os\ndef job():\n    MARK\n    time.sleep(1000)\nhorovod.run(job, np=2)"
    assert "KeyboardInterrupt" in errors(await kernel.run(job, kernel.interrupt))

    # The kernel is restarted, and killed, in the middle of a cell or not.
    pids = await ranks(START)
    await kernel.client.km.restart_kernel(now=True)
    await gone(pids)
    await kernel.client.kc.wait_for_ready(timeout=60)
    pids = await ranks(START)
    os.kill(kernel.client.km.provisioner.pid, signal.SIGKILL)
    await gone(pids)


HOSTS = """\
import horovod, os, signal, threading, time
def interrupt_when_there(path):
    while not os.path.exists(path):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
session = horovod.interactive(np=3, hosts="a:2,b:1")
---
%%hvd
import os, time, numpy as np, horovod.numpy as hvd
hvd.init()
print("on", os.uname().nodename)
hvd.allreduce(np.ones(2) * hvd.rank(), op=hvd.Sum).tolist()
---
session.pull("(hvd.rank(), os.uname().nodename)")
---
session.push(data=b"x" * (9 << 20))
session.pull("len(data)")
---
%%hvd
if hvd.rank() == 2:
    raise ValueError("bad shard")
hvd.allreduce(np.ones(2))
---
threading.Thread(target=interrupt_when_there, args=["FOLDER/cell"]).start()
get_ipython().run_cell_magic("hvd", "", "hvd.barrier()\\nhvd.rank() or open('FOLDER/cell', 'w')\\ntime.sleep(1000)")
---
%%hvd
hvd.allreduce(np.ones(2), op=hvd.Sum).tolist()
---
%%hvd
if hvd.rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL) if "signal" in globals() else os._exit(9)
hvd.allreduce(np.ones(2))
---
def job():
    import numpy as np, horovod.numpy as hvd
    hvd.init()
    return hvd.allreduce(np.ones(1) * hvd.rank(), op=hvd.Sum).tolist(), hvd.cross_size()
horovod.run(job, np=2, hosts="a:1,b:1")
---
threading.Thread(target=interrupt_when_there, args=["FOLDER/job"]).start()
horovod.run(lambda: (open("FOLDER/job", "w"), __import__("time").sleep(1000)), np=2, hosts="a:1,b:1")
"""


def test_ranks_of_a_notebook_on_two_hosts(tmp_path: Path) -> None:
    if reason := namespaces.why_not():
        pytest.skip(reason)
    cells = [nbformat.v4.new_code_cell(source) for source in HOSTS.replace("FOLDER", str(tmp_path)).split("---\n")]
    path = tmp_path / "hosts.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    run = [sys.executable, "-m", "jupyter", "execute", "--inplace", "--allow-errors", "--timeout=300", str(path)]
    (tmp_path / "cluster").mkdir()
    with Cluster(tmp_path / "cluster") as cluster:
        done = subprocess.run(cluster.machines["login"].command(*run), capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        left = [line for host in "ab" for line in cluster.processes(host).values() if "horovod" in line]
    assert not left
    _, first, where, size, failed, stopped, again, lost, ran, ended = nbformat.read(path, as_version=4).cells
    assert result(first) == "[3.0, 3.0]"
    assert sorted(stream(first).splitlines()) == ["[0] on a", "[1] on a", "[2] on b"]
    assert result(where) == "[(0, 'a'), (1, 'a'), (2, 'b')]"
    assert result(size) == str([9 << 20] * 3)
    assert "rank 2:\n" in errors(failed) and "ValueError: bad shard" in errors(failed)
    assert "KeyboardInterrupt: the cell was interrupted on all ranks" in errors(stopped)
    assert result(again) == "[3.0, 3.0]"
    assert "rank 2 on b" in errors(lost) and "the ranks have ended" in errors(lost)
    assert result(ran) == "[([1.0], 2), ([1.0], 2)]"
    assert "KeyboardInterrupt" in errors(ended)


def test_the_example_trains_and_plots(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "digits.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear its outputs before a commit"
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    asyncio.run(client.async_execute())
    plots = [o.data for cell in notebook.cells for o in cell.get("outputs", ()) if o.output_type == "display_data"]
    assert len(plots) == 2 and all(len(data["image/png"]) > 5000 for data in plots)
    (accuracy,) = (cell for cell in notebook.cells if cell.source.endswith("\naccuracy"))
    assert float(result(accuracy)) > 0.95
