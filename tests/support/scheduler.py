"""The common part of real schedulers on hosts of our own, such as Slurm and Grid Engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import namespaces
from namespaces import Cluster, Started

__all__ = ["Scheduler", "run_on_login", "why_not"]

_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_UP_S = 60


def why_not(name: str, programs: Sequence[str], packages: str) -> str:
    """Why there can be no scheduler here; empty when there can."""
    missing = [program for program in programs if shutil.which(program, path=_PATH) is None]
    return namespaces.why_not() or f"{name} needs {', '.join(missing)}: apt-get install {packages}" * bool(missing)


class Scheduler(Started):
    """A scheduler on a cluster; use as a context manager. Subclasses start its daemons in ``_come_up``.

    Attributes:
        folder: see above.
        environ: the environment of its programs.
    """

    def __init__(self, cluster: Cluster, folder: Path, **environ: str) -> None:
        self._cluster, self.folder = cluster, folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environ = {**os.environ, "PATH": _PATH, **environ}
        self.environ.pop("HOROVOD_SECRET_KEY", None)

    def logs(self) -> str:
        """The last lines of all its logs."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{file}: {file.read_text(errors='replace')[-800:]}" for file in files)

    def _start(self, host: str, *words: str) -> None:
        """Start a daemon; what it prints is a log."""
        with (self.folder / f"{words[0]}-{host}.out.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    self._cluster.machines[host].command(*words),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.environ,
                    start_new_session=True,
                )
            )

    def _await(self, is_up: Callable[[subprocess.CompletedProcess[str]], bool], *words: str) -> None:
        """Run a program until what it says shows that the daemons are up."""
        deadline = time.monotonic() + _UP_S
        while not is_up(done := self.run(*words, check=False)):
            assert time.monotonic() < deadline, f"{words}: {done.stdout}{done.stderr}\n{self.logs()}"
            time.sleep(0.1)

    def run(
        self, *words: str, check: bool = True, timeout_s: float = 300, host: str = "login", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, such as srun or qsub, on a host.

        Args:
            *words: program and arguments.
            check: whether it must end well.
            timeout_s: a daemon that is not there makes some wait for ever.
            host: where.
            **environ: more variables.
        """
        done = subprocess.run(
            self._cluster.machines[host].command(*words),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env={**self.environ, **environ},
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done

    def close(self) -> None:
        """Leave nothing."""
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()


def run_on_login(kind: type[Scheduler]) -> None:
    """Run the command of this process's arguments on login of a new scheduler, and end with its exit code."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        for folder in (one, other):
            Path(folder).chmod(0o755)
        with Cluster(Path(one)) as cluster, kind(cluster, Path(other)) as scheduler:
            words = cluster.machines["login"].command(*sys.argv[1:])
            sys.exit(subprocess.run(words, env=scheduler.environ).returncode)
