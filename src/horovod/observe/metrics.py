"""Exports the metrics of this rank while the job runs: to a file periodically, or at a port that answers GET.

Source: OpenMetrics 1.0, https://prometheus.io/docs/specs/om/open_metrics_spec/.
"""

from __future__ import annotations

import contextlib
import glob
import http.server
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from horovod.config import Config
from horovod.engine.stats import Stats
from horovod.errors import InitError
from horovod.files import replace_file
from horovod.logs import logger

__all__ = ["CONTENT_TYPE", "MetricsExport", "file_of", "render"]

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

#: Largest number of connections at once, and time limit of one, in seconds; others are closed.
_MOST, _SECONDS, _LOOK_S = 8, 10.0, 0.2


class MetricsExport:
    """Exports metrics according to the settings, from now until ``close``.

    Raises:
        InitError: the file cannot be written, or the port is taken.
    """

    def __init__(self, config: Config, rank: int, local_rank: int, size: int, text: Callable[[], str]) -> None:
        self._text, self._every_s = text, config.metrics_interval_s
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._path: Path | None = None
        self._server: _Server | None = None
        if config.metrics_filename:
            self._path = file_of(config.metrics_filename, rank)
            try:
                self._write()
                _forget_lost(Path(config.metrics_filename), size)
            except OSError as error:
                raise InitError(f"HOROVOD_METRICS_FILENAME: cannot write {self._path}: {error.strerror}") from None
            self._threads.append(threading.Thread(target=self._write_often, name="horovod-metrics", daemon=True))
        if config.metrics_port:
            place = config.metrics_address, config.metrics_port + local_rank
            try:
                self._server = _Server(place, text)
            except (OSError, OverflowError) as error:
                raise InitError(
                    f"cannot listen at {place[0]} port {place[1]} (HOROVOD_METRICS_PORT "
                    f"+ local rank {local_rank}): {error}"
                ) from None
            self._threads.append(
                threading.Thread(
                    target=self._server.serve_forever, args=(_LOOK_S,), name="horovod-metrics", daemon=True
                )
            )
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        assert self._path is not None
        replace_file(self._path, self._text().encode())

    def _write_often(self) -> None:
        while not self._is_over.wait(self._every_s):
            try:
                self._write()
            except OSError as error:
                logger.warning(f"{self._path} gets no more metrics: {error}")
                return

    def close(self) -> None:
        """Write the file for the last time, and stop listening; a second call does nothing."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._write()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        for thread in self._threads:
            thread.join(_SECONDS)


def file_of(name: str, rank: int) -> Path:
    """Return the file of a rank: ``job.prom`` becomes ``job.3.prom``."""
    path = Path(name)
    return path.with_name(f"{path.stem}.{rank}{path.suffix}")


def _forget_lost(path: Path, size: int) -> None:
    """Remove files of ranks that the job does not have, or not any more: a collector would show them for ever."""
    for other in path.parent.glob(f"{glob.escape(path.stem)}.*{glob.escape(path.suffix)}"):
        number = other.name[len(path.stem) + 1 : len(other.name) - len(path.suffix)]
        if number.isdigit() and int(number) >= size:
            other.unlink(missing_ok=True)


def render(stats: Stats, labels: Mapping[str, str], size: int) -> str:
    """Return the numbers of ``hvd.stats()`` as OpenMetrics text, for Prometheus and others."""
    kinds = stats.kinds.items()
    families: list[tuple[str, str, str, str, list[tuple[str, float]]]] = [
        ("horovod_operations", "counter", "", "Operations that this rank has submitted.",
         [(kind, usage.operations) for kind, usage in kinds]),
        ("horovod_tensor_bytes", "counter", "bytes", "Size of its tensors in them.",
         [(kind, usage.bytes) for kind, usage in kinds]),
        ("horovod_operations_in_flight", "gauge", "", "Operations that are not done.", [("", stats.in_flight)]),
        ("horovod_fused_operations", "counter", "", "Operations executed together with others.", [("", stats.fused)]),
        ("horovod_fusions", "counter", "", "Executions that these took.", [("", stats.fusions)]),
        ("horovod_waits", "counter", "", "Times that a thread had to wait for an operation.", [("", stats.waits)]),
        ("horovod_wait_seconds", "counter", "seconds", "Time that threads have waited.", [("", stats.wait_s)]),
        ("horovod_elapsed_seconds", "gauge", "seconds", "Time since init().", [("", stats.elapsed_s)]),
        ("horovod_resets", "counter", "", "Changes of the members of an elastic job.", [("", stats.resets)]),
        ("horovod_ranks", "gauge", "", "Ranks of the job.", [("", size)]),
    ]  # fmt: skip
    lines = []
    for name, kind, unit, text, samples in families:
        lines.append(f"# TYPE {name} {kind}")
        lines += [f"# UNIT {name} {unit}"] if unit else []
        lines.append(f"# HELP {name} {text}")
        sample = f"{name}_total" if kind == "counter" else name
        for operation, value in samples:
            own = {**labels, "kind": operation} if operation else labels
            lines.append(f"{sample}{{{_text(own)}}} {value:.17g}")
    return "\n".join([*lines, "# EOF\n"])


def _text(labels: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, place: tuple[str, int], text: Callable[[], str]) -> None:
        self.text = text
        self._since: dict[socket.socket, float] = {}
        known = socket.getaddrinfo(*place, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = known[0]
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._since) >= _MOST:
            self.shutdown_request(request)
            return
        self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        for request, at in [*self._since.items()]:
            if time.monotonic() > at + _SECONDS:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def server_close(self) -> None:
        super().server_close()
        for request in [*self._since]:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the end of a client is not an error


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _SECONDS

    def do_GET(self) -> None:
        is_ours = self.path.partition("?")[0] in ("/", "/metrics")
        body = self.server.text().encode() if is_ours else b"see /metrics\n"
        self.send_response(200 if is_ours else 404)
        self.send_header("Content-Type", CONTENT_TYPE if is_ours else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "khorovod"

    def log_message(self, format: str, *args: object) -> None:
        pass
