"""A real Slurm on hosts of our own: munged and slurmd on a, b and c, slurmctld on login.

Needs what ``namespaces`` needs and, on Debian, ``apt-get install slurm-wlm munge``. Each host has its own folders
``/run/munge`` and ``/sys/fs/cgroup``, so the programs find everything where a cluster has it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import namespaces
from namespaces import Cluster

__all__ = ["Slurm", "why_not"]

_TOOLS = ("munged", "slurmctld", "slurmd", "srun")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_NODES, _CPUS, _UP_S = ("a", "b", "c"), 8, 60
#: slurmd ends where it finds none, or a mixture of both kinds.
_CGROUPS = """
mount -t tmpfs cgroup /sys/fs/cgroup; mkdir /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd || mount -t cgroup2 cgroup /sys/fs/cgroup
"""
_CONF = """
ClusterName=khorovod
SlurmctldHost=login(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS={folder}/tmp-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldTimeout=60
SlurmdTimeout=60
KillWait=5
ReturnToService=2
SchedulerParameters=sched_min_interval=0,bf_interval=1
{nodes}
PartitionName=all Nodes=a,b,c Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty when there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    return namespaces.why_not() or (
        f"Slurm needs {', '.join(missing)}: apt-get install slurm-wlm munge" * bool(missing)
    )


class Slurm:
    """Slurm on a cluster; use as a context manager.

    Args:
        cluster: its hosts.
        folder: for configuration, state and logs.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self.folder = cluster, folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environ = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environ.pop("HOROVOD_SECRET_KEY", None)

    def __enter__(self) -> Slurm:
        folder = self.folder
        for name in ("state", *(f"{kind}-{node}" for node in _NODES for kind in ("spool", "tmp"))):
            (folder / name).mkdir()
        machines = self._cluster.machines
        nodes = "\n".join(f"NodeName={n} NodeAddr={machines[n].ipv4} CPUs={_CPUS} State=UNKNOWN" for n in _NODES)
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, nodes=nodes))
        (folder / "cgroup.conf").write_text("IgnoreSystemd=yes\n")
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        try:
            for name in machines:
                self._start_munge(name)
            self._start("login", "slurmctld", "-D", "-f", f"{folder}/slurm.conf")
            for name in _NODES:
                self._start(name, "slurmd", "-D", "-N", name, "-f", f"{folder}/slurm.conf")
            self._await_nodes()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start_munge(self, name: str) -> None:
        own = self.folder / f"munge-{name}"
        own.mkdir(mode=0o711)
        mounts = "mkdir -p /run/munge; mount -t tmpfs -o mode=755 munge /run/munge" + _CGROUPS * (name in _NODES)
        done = subprocess.run(self._cluster.machines[name].command("sh", "-ec", mounts), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self._start(
            name, "munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key",
            f"--log-file={own}/log", f"--pid-file={own}/pid", f"--seed-file={own}/seed",
        )  # fmt: skip

    def _start(self, name: str, *words: str) -> None:
        self._daemons.append(
            subprocess.Popen(
                self._cluster.machines[name].command(*words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self.environ,
                start_new_session=True,
            )
        )

    def _await_nodes(self) -> None:
        deadline = time.monotonic() + _UP_S
        said = ""
        while time.monotonic() < deadline:
            done = self.run("sinfo", "-h", "-N", "-o", "%N %t", check=False)
            said = done.stdout + done.stderr
            if sorted(done.stdout.split()) == sorted([*_NODES, *["idle"] * len(_NODES)]):
                return
            time.sleep(0.1)
        raise AssertionError(f"Slurm did not come up: {said}\n{self.logs()}")

    def logs(self) -> str:
        """The last lines of all its logs."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("munge-*/log")]
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-800:]}" for file in files)

    def run(
        self, *words: str, check: bool = True, timeout_s: float = 300, host: str = "login", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, such as srun, on a host.

        Args:
            *words: program and arguments.
            check: whether it must end well.
            timeout_s: a slurmd that is not there makes srun wait for ever.
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

    def start(
        self, *words: str, host: str = "login", stderr: int | None = None, **environ: str
    ) -> subprocess.Popen[str]:
        """Start a program on a host, with a pipe for its output; the caller waits for it."""
        return subprocess.Popen(
            self._cluster.machines[host].command(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**self.environ, **environ},
        )

    def crash(self, name: str) -> None:
        """Kill everything on a node, at once and for good."""
        self._cluster.crash(name)

    def close(self) -> None:
        """Leave nothing."""
        for name in _NODES:
            self._end_in(name)
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()

    def _end_in(self, name: str) -> None:
        try:
            running = self._cluster.processes(name)
        except (OSError, IndexError):
            return  # it has crashed
        for pid, command in running.items():
            if "slurm" in command.split()[0]:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    pass


def main() -> None:
    """Run a command on login of a new Slurm: ``slurm.py COMMAND...``."""
    import tempfile

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        for folder in (one, other):
            Path(folder).chmod(0o755)
        with Cluster(Path(one)) as cluster, Slurm(cluster, Path(other)) as slurm:
            words = cluster.machines["login"].command(*sys.argv[1:])
            sys.exit(subprocess.run(words, env=slurm.environ).returncode)


if __name__ == "__main__":
    main()
