"""Hosts of our own: network namespaces with a name, addresses and an sshd each, on one bridge.

Every host has its own network, host name, process table and ``/etc/hosts``, and b a clock of its own where the kernel
has such. Files are shared, except that a user's startup files are empty there: pyenv's takes a lock, and a login shell
killed with it delays every later one by a minute. ``login`` is a machine without sshd, from which horovodrun is
started: it shares our process table, so that its processes can be found. Needs root, ``ip`` and ``sshd``. ``cut`` pulls
the cable of a host, ``crash`` ends all of it at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import string
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

__all__ = ["AHEAD_S", "Cluster", "Machine", "Started", "why_not"]

_TOOLS = ("ip", "sshd", "ssh", "ssh-keygen", "unshare", "nsenter", "mount")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_SETUP = """
set -e
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
if [ -d {home}/.ssh ]; then mount --bind {folder}/empty {home}/.ssh; fi
for startup in .bashrc .profile .bash_profile .bash_login; do
    if [ -f {home}/$startup ]; then mount --bind /dev/null {home}/$startup; fi
done
hostname {name}
"""
#: By how much the clock of b is ahead: no two machines were booted at the same moment.
AHEAD_S = 100_000 if Path("/proc/self/ns/time_for_children").exists() else 0


def why_not() -> str:
    """Why there can be no hosts of our own here; empty when there can."""
    if os.geteuid() != 0:
        return "hosts of our own need root: network namespaces"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    return f"hosts of our own need {', '.join(missing)}: apt-get install openssh-server iproute2" if missing else ""


#: One for each cluster of this process.
_letters = iter(string.ascii_lowercase)


@dataclass
class Machine:
    """One host.

    Attributes:
        name: its host name.
        ipv4, ipv6: its addresses.
        is_login: whether it has no sshd, and shares our process table.
        clock_s: by how much its monotonic clock is ahead of ours.
        device: its end of the cable, as seen from inside.
        holder: the process that holds its namespaces.
    """

    name: str
    ipv4: str
    ipv6: str
    is_login: bool
    clock_s: int = 0
    device: str = "eth0"
    holder: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        """The first process inside."""
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
        return self.holder.pid if self.is_login else int(children[0])

    def command(self, *words: str) -> list[str]:
        """The command line that runs ``words`` on this host, in the current folder."""
        kinds = ["-n", "-u", "-m"] + ([] if self.is_login else ["-p"]) + (["-T"] if self.clock_s else [])
        return ["nsenter", "-t", str(self.pid), *kinds, f"--wdns={Path.cwd()}", "--", *words]


class Started:
    """A context manager that starts what a subclass describes, and closes it, also if the start fails."""

    def __enter__(self) -> Self:
        try:
            self._come_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _come_up(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End all processes, and remove what was made."""
        raise NotImplementedError


class Cluster(Started):
    """Hosts a, b and c, and login; use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = f"kh{os.getpid() % 100000}{next(_letters)}"
        self._bridge = f"{self._mark}br"
        self.machines = {
            name: Machine(name, f"10.77.0.{i}", f"fd77::{i}", name == "login", AHEAD_S if name == "b" else 0)
            for i, name in enumerate(("login", "a", "b", "c"), 1)
        }

    def _come_up(self) -> None:
        self._write_files()
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "link", "set", self._bridge, "up")
        for machine in self.machines.values():
            self._start(machine)

    def _write_files(self) -> None:
        names = "".join(f"{m.ipv4} {m.name}\n{m.ipv6} {m.name} {m.name}6\n" for m in self.machines.values())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n{names}")
        (self.folder / "empty").mkdir()
        for key in ("host_key", "user_key", "other_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        public = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        pattern = "a,b,c,a6,b6,c6,10.77.0.*,fd77::*,[10.77.0.*]:*,[a]:*"
        (self.folder / "known_hosts").write_text(f"{pattern} {public}\n")
        (self.folder / "authorized_keys").write_text((self.folder / "user_key.pub").read_text())
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/authorized_keys\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nMaxStartups 100\n"
        )
        # Other names for host a, each with something wrong.
        (self.folder / "ssh_config").write_text(
            "Host keyless\n  HostName 10.77.0.2\n"
            f"  IdentityFile {self.folder}/other_key\n"
            "Host stranger\n  HostName 10.77.0.2\n  UserKnownHostsFile /dev/null\n"
            "Host closed\n  HostName 10.77.0.2\n  Port 9\n"
            "Host asking\n  HostName 10.77.0.2\n  Port 2222\n"
            f"Host * !keyless\n  IdentityFile {self.folder}/user_key\n"
            f"Host *\n  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
            "  IdentitiesOnly yes\n"
        )

    def _start(self, machine: Machine) -> None:
        namespace, cable = f"{self._mark}{machine.name}", f"{self._mark}{machine.name}"
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", machine.device, "netns", namespace)
        _run("ip", "link", "set", cable, "master", self._bridge, "up")
        inside = ("ip", "-n", namespace)
        _run(*inside, "addr", "add", f"{machine.ipv4}/24", "dev", machine.device)
        _run(*inside, "addr", "add", f"{machine.ipv6}/64", "dev", machine.device, "nodad")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", machine.device, "up")
        setup = _SETUP.format(folder=self.folder, home=Path.home(), name=machine.name)
        sshd, conf = shutil.which("sshd", path=_PATH), self.folder / "sshd_config"
        asking = "-o PasswordAuthentication=yes -o PubkeyAuthentication=no"
        end = "echo up; exec sleep infinity"
        if not machine.is_login:
            end = f"mkdir -p /run/sshd; {sshd} -f {conf} -p 2222 {asking}; echo up; exec {sshd} -D -f {conf}"
        own = [] if machine.is_login else ["--pid", "--fork", "--kill-child", "--mount-proc"]
        own += ["--time", "--monotonic", str(machine.clock_s)] if machine.clock_s else []
        machine.holder = subprocess.Popen(
            ["ip", "netns", "exec", namespace, "unshare", "--uts", "--mount", *own, "sh", "-c", setup + end],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "PATH": _PATH},
        )
        assert machine.holder.stdout.readline() == b"up\n", f"host {machine.name} did not come up"

    def processes(self, name: str) -> dict[int, str]:
        """Command line of each process on a host, by its number on this machine."""
        own = Path(f"/proc/{self.machines[name].pid}/ns/pid").readlink()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (folder / "ns" / "pid").readlink() == own:
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(folder.name)] = command.strip()
            except OSError:
                continue  # ended meanwhile
        return {pid: command for pid, command in found.items() if command}

    def crash(self, name: str) -> None:
        """Kill everything on a host, at once and for good."""
        machine = self.machines[name]
        os.kill(machine.pid, signal.SIGKILL)
        machine.holder.wait()

    def cut(self, name: str) -> None:
        """Pull the cable."""
        _run("ip", "link", "set", f"{self._mark}{name}", "down")

    def mend(self, name: str) -> None:
        """Put the cable back in."""
        _run("ip", "link", "set", f"{self._mark}{name}", "up")

    def _stop(self, machine: Machine) -> None:
        if machine.holder is not None:
            machine.holder.kill()
            machine.holder.wait()
            machine.holder.stdout.close()
            machine.holder = None
        _try("ip", "link", "del", f"{self._mark}{machine.name}")
        _try("ip", "netns", "del", f"{self._mark}{machine.name}")

    def close(self) -> None:
        """Leave nothing."""
        for machine in self.machines.values():
            self._stop(machine)
        _try("ip", "link", "del", self._bridge)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PATH": _PATH})
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def _try(*words: str) -> None:
    subprocess.run(words, capture_output=True, env={**os.environ, "PATH": _PATH})


def main() -> None:
    """Run a command on a host of a new cluster: ``namespaces.py HOST COMMAND...``."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        host, *words = sys.argv[1:]
        sys.exit(subprocess.run(cluster.machines[host].command(*words)).returncode)


if __name__ == "__main__":
    main()
