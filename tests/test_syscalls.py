"""Python built for older systems, as those of uv and conda are, and systems that refuse a call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launching import horovodrun

from horovod import syscalls

_OLDER = """
import os, signal
del os.memfd_create, os.MFD_CLOEXEC, os.pidfd_open, signal.pidfd_send_signal
"""
_TRAIN = """
import os
import numpy as np, horovod.numpy as hvd
hvd.init()
assert not hasattr(os, "memfd_create")
print(hvd.allreduce(np.ones(500_000), op=hvd.Sum).sum())
"""


def test_a_python_built_for_an_older_system_works(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_OLDER)
    (tmp_path / "train.py").write_text(_TRAIN)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    ended = horovodrun("-np", "2", "python", str(tmp_path / "train.py"), PYTHONPATH=path)
    assert (ended.code, sorted(ended.lines)) == (0, ["[0]<stdout>:1000000.0", "[1]<stdout>:1000000.0"]), ended.err


def test_a_system_that_refuses_a_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "_PIDFD_OPEN", 9999)
    with pytest.raises(OSError, match=r"refuses pidfd_open.*use Linux 5.3 or newer"):
        syscalls.open_process(os.getpid())


def test_a_process_that_has_ended_is_not_found() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ProcessLookupError):
        syscalls.open_process(child)
