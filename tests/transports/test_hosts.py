"""The conformance suite on hosts of our own: shared memory inside, Gloo over their network."""

from __future__ import annotations

import sys

import pytest
from launching import HOROVODRUN, horovodrun
from namespaces import Cluster

SCRIPT = f"""
import sys
sys.path[:0] = {sys.path!r}
import conformance
import horovod.torch as hvd
hvd.init()
conformance.everything(False)
print("all of it is right", flush=True)
"""


@pytest.mark.slow
def test_everything_moves_between_hosts(cluster: Cluster) -> None:
    login = cluster.machines["login"].command(*HOROVODRUN)
    ended = horovodrun("-np", "4", "-H", "a:1,b:1,localhost:2", sys.executable, "-c", SCRIPT, program=login)
    assert ended.code == 0, ended.err
    assert sum("all of it is right" in line for line in ended.lines) == 4, ended.err
