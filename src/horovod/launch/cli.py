"""``horovodrun``: the entry point, which loads the rest."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from horovod.launch.signals import ToldToEnd, held_back, told_to_end

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see ``command.main``."""
    try:
        with told_to_end(), held_back():
            from horovod.launch import command
    except ToldToEnd as told:
        print(f"horovodrun: {told.text}", file=sys.stderr)
        return 128 + told.number
    return command.main(argv)


if __name__ == "__main__":
    sys.exit(main())
