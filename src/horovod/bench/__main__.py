"""``python -m horovod.bench``."""

from horovod.bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
