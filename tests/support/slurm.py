"""A real Slurm on hosts of our own: munged and slurmd on a, b and c, slurmctld on login.

Needs what ``namespaces`` needs and, on Debian, ``apt-get install slurm-wlm munge``. Each host has its own folders
``/run/munge`` and ``/sys/fs/cgroup``, so the programs find everything where a cluster has it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

import scheduler
from namespaces import Cluster
from scheduler import Scheduler, run_on_login

__all__ = ["Slurm", "why_not"]

_TOOLS = ("munged", "slurmctld", "slurmd", "srun")
_NODES, _CPUS, _GPUS = ("a", "b", "c"), 8, 2
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
GresTypes=gpu
SlurmctldTimeout=60
SlurmdTimeout=60
KillWait=5
ReturnToService=2
SchedulerParameters=sched_min_interval=0,sched_interval=1,bf_interval=1
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=a,b,c Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES PriorityTier=1 GraceTime=300
PartitionName=urgent Nodes=a,b,c MaxTime=INFINITE State=UP PriorityTier=2
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty when there can."""
    return scheduler.why_not("Slurm", _TOOLS, "slurm-wlm munge")


class Slurm(Scheduler):
    """Slurm on a cluster; see ``Scheduler``."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(cluster, folder, SLURM_CONF=str(folder / "slurm.conf"))

    def _come_up(self) -> None:
        folder = self.folder
        for name in ("state", *(f"{kind}-{node}" for node in _NODES for kind in ("spool", "tmp"))):
            (folder / name).mkdir()
        machines = self._cluster.machines
        node = f"CPUs={_CPUS} Gres=gpu:{_GPUS} State=UNKNOWN"
        nodes = "\n".join(f"NodeName={n} NodeAddr={machines[n].ipv4} {node}" for n in _NODES)
        for number in range(_GPUS):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{_GPUS - 1}]\n")
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, nodes=nodes))
        (folder / "cgroup.conf").write_text("IgnoreSystemd=yes\n")
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        for name in machines:
            self._start_munge(name)
        self._start("login", "slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for name in _NODES:
            self._start(name, "slurmd", "-D", "-N", name, "-f", f"{folder}/slurm.conf")
        idle = sorted([*_NODES, *["idle"] * len(_NODES)])
        self._await(lambda done: sorted(done.stdout.split()) == idle, "sinfo", "-h", "-p", "all", "-N", "-o", "%N %t")

    def _start_munge(self, name: str) -> None:
        own = self.folder / f"munge-{name}"
        own.mkdir(mode=0o711)
        mounts = "mkdir -p /run/munge; mount -t tmpfs -o mode=755 munge /run/munge" + _CGROUPS * (name in _NODES)
        done = subprocess.run(self._cluster.machines[name].command("sh", "-ec", mounts), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self._start(
            name, "munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key",
            f"--log-file={self.folder}/munge-{name}.log", f"--pid-file={own}/pid", f"--seed-file={own}/seed",
        )  # fmt: skip

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
        super().close()

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


if __name__ == "__main__":
    run_on_login(Slurm)
