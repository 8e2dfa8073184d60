"""``horovod.interactive`` and the cell magic ``%%hvd``."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from horovod.bindings.docstrings import explained_like
from horovod.errors import CellError, LaunchError
from horovod.launch.assemble import choose_hosts, interface_names
from horovod.launch.run import run
from horovod.launch.ssh import Access
from horovod.notebook.session import Session

__all__ = ["interactive"]


@explained_like(run, np="number of ranks.")
def interactive(
    np: int,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    network_interfaces: Any = None,
    executable: str | None = None,
) -> Session:
    """Start ranks that live between the cells of a notebook, and the cell magic ``%%hvd``, which runs a cell on them.

    An earlier session is ended. The ranks end with this process, even if it crashes.

    Returns:
        The session, with ``push`` and ``pull`` for variables, ``restart`` and ``close``.

    Raises:
        ValueError: arguments contradict each other.
        LaunchError: the ranks could not be started.

    Blocks until all ranks are ready.
    """
    if hosts and hostfile:
        raise ValueError("give hosts or hostfile, not both")
    if Session.current is not None:
        Session.current.close()
    interfaces = interface_names(network_interfaces, "network_interfaces")
    python = executable or sys.executable
    access = Access(python, ssh_port or 0, ssh_identity_file or "", interfaces=interfaces)
    settings = {} if start_timeout is None else {"HOROVOD_START_TIMEOUT": str(start_timeout)}
    try:
        session = Session(np, lambda: choose_hosts(hosts or "", hostfile or "", np), python, access, settings)
    except (LaunchError, ValueError) as error:
        raise error.with_traceback(None)  # noqa: B904
    if "IPython" in sys.modules:
        _offer_magic()
    return session


def _offer_magic() -> None:
    from IPython import get_ipython
    from IPython.core.magic import output_can_be_silenced

    shell = get_ipython()
    if shell is None:
        return

    @output_can_be_silenced
    def hvd(line: str, cell: str) -> Any:
        """Run the cell on all ranks of ``horovod.interactive``; rank 0's last value is its result."""
        if line.strip():
            raise CellError(f"%%hvd takes no arguments; received {line.strip()!r}")
        # Add a line for the magic itself, so that line numbers match the notebook's.
        assert Session.current is not None
        try:
            return Session.current.execute(f"\n{cell}", f"In[{shell.displayhook.prompt_count}]")
        except SyntaxError as error:  # IPython would show its own frames
            raise CellError("".join(traceback.format_exception_only(error)).rstrip()) from None

    shell.register_magic_function(hvd, "cell", "hvd")
