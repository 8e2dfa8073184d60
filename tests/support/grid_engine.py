"""A real Grid Engine on hosts of our own: sge_qmaster on login, sge_execd on a and b.

Needs what ``namespaces`` needs and, on Debian, ``apt-get install gridengine-master gridengine-exec gridengine-client``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import namespaces
from namespaces import Cluster

__all__ = ["GridEngine", "why_not"]

_ROOT, _TOOLS = Path("/var/lib/gridengine"), Path("/usr/lib/gridengine")
_RESOURCES = Path("/usr/share/gridengine")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_PROGRAMS = ("sge_qmaster", "sge_execd", "qsub")
_NODES, _SLOTS, _UP_S = ("a", "b"), 2, 60
_BOOTSTRAP = """admin_user none
default_domain none
ignore_fqdn false
spooling_method berkeleydb
spooling_lib libspoolb
spooling_params {folder}/spool
binary_path /usr/sbin
qmaster_spool_dir {folder}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
_ENVIRONMENT = """pe_name mpi
slots 99
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule $round_robin
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary TRUE
qsort_args NONE
"""


def why_not() -> str:
    """Why there can be no Grid Engine here; empty when there can."""
    missing = [tool for tool in _PROGRAMS if shutil.which(tool, path=_PATH) is None]
    return namespaces.why_not() or (
        f"Grid Engine needs {', '.join(missing)}: apt-get install gridengine-master gridengine-exec gridengine-client"
        * bool(missing)
    )


class GridEngine:
    """Grid Engine on a cluster; use as a context manager.

    Args:
        cluster: its hosts.
        folder: for configuration, state and logs.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self.folder = cluster, folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environ = {
            **os.environ,
            "PATH": _PATH,
            "SGE_ROOT": str(folder),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": "6444",
            "SGE_EXECD_PORT": "6445",
            "SGE_ND": "1",  # stay in the foreground
        }
        self.environ.pop("HOROVOD_SECRET_KEY", None)

    def __enter__(self) -> GridEngine:
        try:
            self._write()
            self._start("login", "sge_qmaster")
            self._await("qconf", "-sconf")
            self._configure()
            for name in _NODES:
                self._start(name, "sge_execd")
            self._await_nodes()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self) -> None:
        folder = self.folder
        for name in ("bin", "lib", "util", "utilbin"):
            (folder / name).symlink_to(_ROOT / name)
        for name in ("default/common", "spool", "qmaster/job_scripts", "execd"):
            (folder / name).mkdir(parents=True)
        (folder / "default/common/bootstrap").write_text(_BOOTSTRAP.format(folder=folder))
        (folder / "default/common/act_qmaster").write_text("login\n")
        text = (_RESOURCES / "default-configuration").read_text()
        ours = {"execd_spool_dir": str(folder / "execd"), "min_uid": "0", "min_gid": "0"}
        lines = [line for line in text.splitlines() if line.split()[0] not in ours]
        lines += [f"{name} {value}" for name, value in ours.items()]
        (folder / "configuration").write_text("\n".join(lines) + "\n")
        (folder / "mpi.pe").write_text(_ENVIRONMENT)
        self.run(str(_TOOLS / "spoolinit"), "berkeleydb", "libspoolb", str(folder / "spool"), "init")
        resources = _RESOURCES / "util/resources"
        for kind, what in (
            ("configuration", folder / "configuration"),
            ("complexes", resources / "centry"),
            ("usersets", resources / "usersets"),
            ("managers", Path("root")),
        ):
            self.run(str(_TOOLS / "spooldefaults"), kind, str(what))

    def _configure(self) -> None:
        self.run("qconf", "-Ap", str(self.folder / "mpi.pe"))
        self.run("qconf", "-as", "login")
        for name in _NODES:
            self.run("qconf", "-ah", name)
            (self.folder / f"{name}.host").write_text(
                f"hostname {name}\nload_scaling NONE\ncomplex_values NONE\nuser_lists NONE\nxuser_lists NONE\n"
                "projects NONE\nxprojects NONE\nusage_scaling NONE\nreport_variables NONE\n"
            )
            self.run("qconf", "-Ae", str(self.folder / f"{name}.host"))
        queue = self.folder / "all.q"
        text = self.run("qconf", "-sq").stdout  # the template
        wanted = {
            "qname": "all.q",
            "hostlist": " ".join(_NODES),
            "slots": str(_SLOTS),
            "pe_list": "mpi",
            "shell": "/bin/sh",
            "shell_start_mode": "unix_behavior",
            "load_thresholds": "NONE",
        }
        lines = [f"{name} {wanted.pop(name, rest)}" for name, _, rest in (one.partition(" ") for one in _joined(text))]
        queue.write_text("\n".join(lines + [f"{name} {text}" for name, text in wanted.items()]) + "\n")
        self.run("qconf", "-Aq", str(queue))

    def _start(self, name: str, program: str) -> None:
        log = (self.folder / f"{program}-{name}.log").open("wb")
        with log:
            self._daemons.append(
                subprocess.Popen(
                    self._cluster.machines[name].command(program),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.environ,
                    start_new_session=True,
                )
            )

    def _await(self, *words: str) -> None:
        deadline = time.monotonic() + _UP_S
        said = ""
        while time.monotonic() < deadline:
            done = self.run(*words, check=False)
            said = done.stdout + done.stderr
            if done.returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError(f"Grid Engine did not come up: {said}\n{self.logs()}")

    def _await_nodes(self) -> None:
        for name in _NODES:
            self._await("sh", "-c", f"qstat -f | grep -E '^all.q@{name} .* lx[^ ]+ *$'")  # no state: it answers

    def logs(self) -> str:
        """The last lines of all its logs."""
        files = [*self.folder.glob("*.log"), self.folder / "qmaster/messages", *self.folder.glob("execd/*/messages")]
        return "\n".join(f"{file}: {file.read_text(errors='replace')[-800:]}" for file in files if file.exists())

    def run(
        self, *words: str, check: bool = True, timeout_s: float = 120, host: str = "login", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, such as qsub, on a host.

        Args:
            *words: program and arguments.
            check: whether it must end well.
            timeout_s: limit.
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


def _joined(text: str) -> list[str]:
    """Lines of qconf, which breaks long ones with a backslash."""
    return text.replace("\\\n", " ").splitlines()


def main() -> None:
    """Run a command on login of a new Grid Engine: ``grid_engine.py COMMAND...``."""
    import tempfile

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        for folder in (one, other):
            Path(folder).chmod(0o755)
        with Cluster(Path(one)) as cluster, GridEngine(cluster, Path(other)) as engine:
            words = cluster.machines["login"].command(*sys.argv[1:])
            sys.exit(subprocess.run(words, env=engine.environ).returncode)


if __name__ == "__main__":
    main()
