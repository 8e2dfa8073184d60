"""Paths, arguments and names that are no UTF-8 work everywhere, and are readable where they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run
from launching import HOROVODRUN, TIMEOUT_S

from horovod.phrases import printable

SCRIPT = r"""
import os, sys
import numpy as np
import horovod.numpy as hvd
from horovod.errors import MismatchError

hvd.init()
for name in ("\ud800", "\udcff", os.getcwd(), "\x00", "\xe9"):
    assert hvd.allreduce(np.ones(3), op=hvd.Sum, name=name).tolist() == [2, 2, 2]
print(ascii((sys.argv[1], os.environ["WORD"], os.getcwd()[-4:])))
try:
    hvd.allreduce(np.ones(3 + hvd.rank()), name="bad\ud800")
except MismatchError as error:
    print(ascii(str(error)))
if hvd.rank() == 1:
    raise ValueError("\udcff\ud800")
hvd.allreduce(np.ones(3), name="late\ud800")
"""


def test_a_folder_in_latin_1_and_names_that_no_file_could_have(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / os.fsdecode(b"tr\xe4in.py")).write_text(SCRIPT)
    flags = ["-np", "2", "--timeline-filename", b"line\xe9", "--output-filename", b"out\xe9"]
    done = subprocess.run(
        [*HOROVODRUN, *flags, sys.executable, b"tr\xe4in.py", b"word\xfe"],
        cwd=folder,
        capture_output=True,
        timeout=TIMEOUT_S,
        env={**os.environb, b"WORD": b"\xff", b"HOROVOD_FLIGHT_RECORDER_DIR": b"dump\xe9", b"OMP_NUM_THREADS": b"1"},
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 1
    assert out.count(r"('word\udcfe', '\udcff', 'caf\udce9')") == 2, err
    assert out.count(r"in allreduce 'bad\\\\ud800'.\n") == 2
    assert r"allreduce 'late\\ud800' (" in err
    assert r"ended with ValueError: \udcff\ud800 at " in err
    assert r"caf\udce9/tr\udce4in.py:" in err
    assert "UnicodeEncodeError" not in err
    assert (folder / os.fsdecode(b"out\xe9") / "rank.0" / "stdout").is_file()
    assert (folder / os.fsdecode(b"line\xe9")).is_file()
    doctor = [*HOROVODRUN, "--doctor", os.fsdecode(b"dump\xe9")]
    told = subprocess.run(doctor, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert r"ValueError: \udcff\ud800" in told.stdout


@pytest.mark.parametrize(
    ("text", "written"), [("a", "a"), ("é", "é"), ("caf\udce9", "caf\\udce9"), ("\ud800", "\\ud800")]
)
def test_what_utf_8_cannot_hold_is_spelt_out(text: str, written: str) -> None:
    assert printable(text) == written


# Python under a strict LC_ALL=C, and on a terminal in Latin-1.
ENCODINGS = {
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "latin-1": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "latin-1"},
}
RECORDED = r"""
import numpy as np
import horovod.numpy as hvd

hvd.init()
for _ in range(3):
    hvd.allreduce(np.ones(3), name="gr\xf6\xdfe\u2192\u03a9")
"""


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_tables_of_names_that_the_terminal_cannot_show(tmp_path: Path, encoding: str) -> None:
    folder = tmp_path / "\u2192"
    (folder / "d\u03a9").mkdir(parents=True)
    (folder / "train.py").write_text(RECORDED)
    names = {"HOROVOD_TIMELINE": "t\u03a9.json", "HOROVOD_FLIGHT_RECORDER_DIR": "d\u03a9"}
    code, told = run(["python", "train.py"], folder, **names, **ENCODINGS[encoding])
    assert code == 0, told
    show = ["python", "-m", "horovod.timeline", "t\u03a9.json"]
    code, told = run(show, folder, **ENCODINGS[encoding])
    assert code == 0, told
    assert r"\u2192\u03a9" in told
    code, told = run([*HOROVODRUN, "--doctor", "d\u03a9"], folder, **ENCODINGS[encoding])
    assert code == 2
    assert ": no dump of a flight recorder" in told, told


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_output_of_ranks_passes_as_it_comes(tmp_path: Path, encoding: str) -> None:
    script = "import sys; sys.stdout.buffer.write('\\xf6\\u2192\\n'.encode())"
    command = [*HOROVODRUN, "-np", "2", "python", "-c", script]
    code, told = run(command, tmp_path, **ENCODINGS[encoding])
    assert code == 0, told
    assert sorted(line for line in told.splitlines() if "]<" in line) == [f"[{n}]<stdout>:\xf6\u2192" for n in (0, 1)]
