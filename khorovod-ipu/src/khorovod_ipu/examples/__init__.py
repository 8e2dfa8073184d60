"""Scripts to run and to copy from: ``python -m khorovod_ipu.examples.popart_digits``."""

from __future__ import annotations

__all__: list[str] = []
