"""Run a command twice at once, with TESTS_HALF=1 and TESTS_HALF=2, on cores that one process would leave idle.

What the second prints is shown when both have ended. In Python because a shell lets what it starts in the background
ignore Ctrl-C, and with it all that the tests start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import Any


def main(command: list[str]) -> int:
    """Run both halves; return 0 when both passed, else the exit code of the first that did not."""
    with tempfile.TemporaryFile() as text:
        halves = [
            subprocess.Popen(command, env={**os.environ, "TESTS_HALF": "1"}),
            subprocess.Popen(
                [*command, "-p", "no:cacheprovider"],
                env={**os.environ, "TESTS_HALF": "2"},
                stdin=subprocess.DEVNULL,
                stdout=text,
                stderr=subprocess.STDOUT,
            ),
        ]

        def end_both(number: int, frame: Any) -> None:
            for half in halves:
                half.send_signal(number)

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both, too
        signal.signal(signal.SIGTERM, end_both)
        codes = [half.wait() for half in halves]
        text.seek(0)
        sys.stdout.buffer.write(text.read())
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
