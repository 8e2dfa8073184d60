"""Start ranks of this benchmark through the project's own launcher, and listen to them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from horovod.bench.events import parse_event
from horovod.bench.mpi_find import clean_environment
from horovod.errors import LaunchError

__all__ = ["horovodrun", "run_job", "torchrun"]


def horovodrun(ranks: int, argv: Sequence[str], hosts: str = "") -> list[str]:
    """The command that runs ``python *argv`` as ``ranks`` ranks under horovodrun, with this interpreter.

    Args:
        ranks: how many.
        argv: what follows python.
        hosts: as for ``horovodrun -H``; this host when empty.
    """
    where = ["-H", hosts] if hosts else []
    launcher = "import sys; from horovod.launch.cli import main; sys.exit(main())"
    return [sys.executable, "-c", launcher, "-np", str(ranks), *where, sys.executable, *argv]


def torchrun(ranks: int, argv: Sequence[str]) -> list[str]:
    """The same under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "--no-python", sys.executable, *argv]


def run_job(command: Sequence[str], on_event: Callable[[dict[str, Any]], None], *, timeout_s: float = 0) -> int:
    """Run ``command``; give its events to ``on_event`` and pass its other output on to stderr.

    Args:
        command: what to start.
        on_event: called with each event.
        timeout_s: end the job after so many seconds; 0 waits as long as it takes.

    Returns:
        The job's exit status.

    Raises:
        LaunchError: the job did not end within ``timeout_s``.
    """
    late = threading.Event()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, errors="replace", env=clean_environment(), stdin=subprocess.DEVNULL
    ) as process:

        def end() -> None:
            late.set()
            process.terminate()

        timer = threading.Timer(timeout_s, end)
        if timeout_s:
            timer.start()
        try:
            _listen(process, on_event)
            status = process.wait()
        except BaseException:
            process.terminate()
            raise
        finally:
            timer.cancel()
            if timeout_s:
                timer.join()
    if late.is_set():
        raise LaunchError(f"the job did not end within {timeout_s:g} s, and was ended: {' '.join(command)}")
    return status


def _listen(process: subprocess.Popen[str], on_event: Callable[[dict[str, Any]], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        event = parse_event(line)
        if event is None:
            sys.stderr.write(line)
        else:
            on_event(event)
