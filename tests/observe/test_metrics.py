"""Numbers of a rank as OpenMetrics, read by the parser of Prometheus' own client."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from launching import horovodrun
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from horovod.config import Config
from horovod.engine.stats import Stats, Usage
from horovod.errors import InitError
from horovod.observe.metrics import CONTENT_TYPE, MetricsExport, file_of, render

STATS = Stats(
    elapsed_s=12.5, operations=9, bytes=1 << 60, in_flight=2, fused=4, fusions=2, waits=7, wait_s=1.25, resets=3,
    kinds={"allreduce": Usage(8, 1 << 60), "broadcast": Usage(1, 5)},
)  # fmt: skip
LABELS = {"job": 'a "job"\\ of\nmine', "rank": "3", "host": "h\u00f6st"}
Samples = dict[tuple[str, str], float]


def samples(text: str, labels: dict[str, str] = LABELS) -> Samples:
    """Name and kind of each sample to its value; all have these labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.type in ("counter", "gauge") and family.documentation.endswith(".")
        for sample in family.samples:
            own = dict(sample.labels)
            kind = own.pop("kind", "")
            assert own.items() >= labels.items()
            found[sample.name, kind] = sample.value
    return found


def free_port() -> int:
    """Return a port that is free, as is the next one; below those that the kernel gives to other programs' sockets."""
    for port in random.sample(range(10_000, 32_000, 2), 100):
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise OSError("none of 100 ports is free")


def test_every_number_is_there_with_type_unit_and_labels() -> None:
    text = render(STATS, LABELS, 4)
    assert text.endswith("# EOF\n")
    assert samples(text) == {
        ("horovod_operations_total", "allreduce"): 8, ("horovod_operations_total", "broadcast"): 1,
        ("horovod_tensor_bytes_total", "allreduce"): 1 << 60, ("horovod_tensor_bytes_total", "broadcast"): 5,
        ("horovod_operations_in_flight", ""): 2, ("horovod_fused_operations_total", ""): 4,
        ("horovod_fusions_total", ""): 2, ("horovod_waits_total", ""): 7, ("horovod_wait_seconds_total", ""): 1.25,
        ("horovod_elapsed_seconds", ""): 12.5, ("horovod_resets_total", ""): 3, ("horovod_ranks", ""): 4,
    }  # fmt: skip
    units = {family.name: family.unit for family in text_string_to_metric_families(text) if family.unit}
    assert units == {
        "horovod_tensor_bytes": "bytes", "horovod_wait_seconds": "seconds", "horovod_elapsed_seconds": "seconds",
    }  # fmt: skip
    assert samples(render(replace(STATS, kinds={}), LABELS, 1))


def test_the_file_is_replaced_as_a_whole_and_files_of_lost_ranks_go(tmp_path: Path) -> None:
    for other in ("job[a].1.prom", "job[a].2.prom", "job[a].11.prom", "job[a].x.prom", "other.7.prom"):
        (tmp_path / other).write_text("of a larger job")
    texts, name = iter(["first", "last"]), str(tmp_path / "job[a].prom")
    export = MetricsExport(Config(metrics_filename=name, metrics_interval_s=9999), 0, 0, 2, lambda: next(texts))
    path = file_of(name, 0)
    with open(path) as reader:
        export.close()
        assert (reader.read(), path.read_text()) == ("first", "last")
    export.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "job[a].0.prom",
        "job[a].1.prom",
        "job[a].x.prom",
        "other.7.prom",
    ]
    with pytest.raises(InitError, match=r"HOROVOD_METRICS_FILENAME: cannot write /proc/none/job\.0\.prom"):
        MetricsExport(Config(metrics_filename="/proc/none/job.prom"), 0, 0, 1, str)


def test_strangers_can_read_and_nothing_else() -> None:
    port = free_port()
    export = MetricsExport(Config(metrics_port=port), 1, 0, 2, lambda: render(STATS, LABELS, 2))
    where = f"http://127.0.0.1:{port}"
    try:
        # Connections that say nothing get no more than their places, and lose them when they end.
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        late = socket.create_connection(("127.0.0.1", port))
        late.settimeout(60)
        assert late.recv(1) == b""
        for one in (*silent, late):
            one.close()
        for _ in range(10_000):
            try:
                answer = urllib.request.urlopen(f"{where}/metrics", timeout=60)
                break
            except OSError:  # the places are not free yet
                continue
        with answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            assert samples(answer.read().decode())["horovod_waits_total", ""] == 7
        for method, path, code in (("POST", "/metrics", 501), ("DELETE", "/", 501), ("GET", "/etc/passwd", 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(where + path, method=method), timeout=60)
            assert refused.value.code == code
            refused.value.close()
        with pytest.raises(InitError, match=f"cannot listen at 127.0.0.1 port {port}"):
            MetricsExport(Config(metrics_port=port), 1, 0, 2, str)
    finally:
        export.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port))


SCRIPT = """
import sys, urllib.request
import numpy as np, horovod.numpy as hvd
hvd.init()
for step in range(5):
    hvd.allreduce(np.zeros(1000, np.float32), name="g")
where = f"http://127.0.0.1:{int(sys.argv[1]) + hvd.local_rank()}/metrics"
text = urllib.request.urlopen(where, timeout=60).read().decode()
hvd.barrier()
print(text.count("horovod_tensor_bytes_total{"), f'rank="{hvd.rank()}"' in text, text.endswith("# EOF\\n"))
"""


def test_ranks_of_a_job_export_to_files_and_ports(tmp_path: Path) -> None:
    port, name = free_port(), tmp_path / "job.prom"
    flags = ("--metrics-filename", str(name), "--metrics-port", str(port), "--metrics-interval", "9999")
    ended = horovodrun("-np", "2", *flags, sys.executable, "-c", SCRIPT, str(port))
    assert ended.code == 0, ended.err
    assert sorted(ended.lines) == ["[0]<stdout>:1 True True", "[1]<stdout>:1 True True"]
    for rank in (0, 1):
        found = samples((tmp_path / f"job.{rank}.prom").read_text(), {"rank": str(rank), "host": os.uname().nodename})
        assert found["horovod_operations_total", "allreduce"] == 5
        assert found["horovod_tensor_bytes_total", "allreduce"] == 20000
        assert found["horovod_ranks", ""] == 2 and found["horovod_operations_in_flight", ""] == 0
