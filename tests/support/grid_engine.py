"""A real Grid Engine on hosts of our own: sge_qmaster on login, sge_execd on a and b.

Needs what ``namespaces`` needs and, on Debian, ``apt-get install gridengine-master gridengine-exec gridengine-client``.
"""

from __future__ import annotations

from pathlib import Path

import scheduler
from namespaces import Cluster
from scheduler import Scheduler, run_on_login

__all__ = ["GridEngine", "why_not"]

_ROOT, _TOOLS = Path("/var/lib/gridengine"), Path("/usr/lib/gridengine")
_RESOURCES = Path("/usr/share/gridengine")
_PROGRAMS = ("sge_qmaster", "sge_execd", "qsub")
_NODES, _SLOTS = ("a", "b"), 2
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
    packages = "gridengine-master gridengine-exec gridengine-client"
    return scheduler.why_not("Grid Engine", _PROGRAMS, packages)


class GridEngine(Scheduler):
    """Grid Engine on a cluster; see ``Scheduler``."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(
            cluster,
            folder,
            SGE_ROOT=str(folder),
            SGE_CELL="default",
            SGE_QMASTER_PORT="6444",
            SGE_EXECD_PORT="6445",
            SGE_ND="1",  # stay in the foreground
        )

    def _come_up(self) -> None:
        self._write()
        self._start("login", "sge_qmaster")
        self._await(lambda done: done.returncode == 0, "qconf", "-sconf")
        self._configure()
        for name in _NODES:
            self._start(name, "sge_execd")
        for name in _NODES:  # no state: it answers
            seen = f"qstat -f | grep -E '^all.q@{name} .* lx[^ ]+ *$'"
            self._await(lambda done: done.returncode == 0, "sh", "-c", seen)

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

    def logs(self) -> str:
        """The last lines of all its logs."""
        files = [self.folder / "qmaster/messages", *self.folder.glob("execd/*/messages")]
        texts = [f"{file}: {file.read_text(errors='replace')[-800:]}" for file in files if file.exists()]
        return "\n".join([super().logs(), *texts])


def _joined(text: str) -> list[str]:
    """Lines of qconf, which breaks long ones with a backslash."""
    return text.replace("\\\n", " ").splitlines()


if __name__ == "__main__":
    run_on_login(GridEngine)
