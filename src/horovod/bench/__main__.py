"""``python -m horovod.bench``."""

from __future__ import annotations

from horovod.bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
