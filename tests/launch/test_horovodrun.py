"""horovodrun with real processes, when all goes well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from launching import HOROVODRUN, TIMEOUT_S, horovodrun

import horovod
from horovod.cgroups import usable_cores
from horovod.launch.console import runnable
from horovod.launch.flags import UsageError

PY = sys.executable
ALL_KNOWING = """
import os
places, settings = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE", "START_TIMEOUT CACHE_CAPACITY CYCLE_TIME"
places, settings = ([os.environ["HOROVOD_" + name] for name in names.split()] for names in (places, settings))
print(*places, os.environ.get("MINE"), *settings)
"""


@pytest.mark.quick
def test_ranks_get_their_place_the_environment_and_the_settings(tmp_path: Path) -> None:
    """A flag counts more than the environment, and that more than the file."""
    (tmp_path / "c.yaml").write_text("params: {cache_capacity: 5, cycle_time_ms: 2}\n")
    flags = ("--start-timeout", "7", "--config-file", "c.yaml")
    own = {"MINE": "x", "HOROVOD_START_TIMEOUT": "3", "HOROVOD_CACHE_CAPACITY": "6"}
    ended = horovodrun("-np", "2", *flags, PY, "-c", ALL_KNOWING, cwd=tmp_path, **own)
    assert ended.code == 0, ended.err
    assert sorted(ended.lines) == ["[0]<stdout>:0 2 0 2 0 1 x 7 6 2", "[1]<stdout>:1 2 1 2 0 1 x 7 6 2"]
    assert ended.err == ""


SECRETS = """
import os
from pathlib import Path
key = os.environ["HOROVOD_SECRET_KEY"]
lines = []
for path in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        lines.append(path.read_bytes())
    except OSError:
        pass
print(os.environ["HOROVOD_JOB_ID"], key, [line for line in lines if key.encode() in line])
"""


def test_secrets_differ_between_jobs_and_stand_on_no_command_line() -> None:
    first, second = (horovodrun("-np", "1", PY, "-c", SECRETS).lines[0].split(None, 2) for _ in range(2))
    assert first[2] == second[2] == "[]"
    assert first[0] != second[0]
    assert len(bytes.fromhex(first[1])) == 32
    assert first[1] != second[1]


def test_one_rank_prints_plainly() -> None:
    ended = horovodrun("-np", "1", PY, "-c", r"import sys; print('a\rb'); sys.stderr.write('no end')")
    assert ended.out == "a\rb\n" or ended.out == "a\nb\n"  # text mode turns \r into \n
    assert ended.err == "no end"


TALK = """
import os, sys
rank = os.environ["HOROVOD_RANK"]
for i in range(10000):
    print(f"{rank} {i} {'x' * (i % 97)}.")
print("y" * 3_000_000)
print("last", end="", flush=True)
"""


@pytest.mark.quick
def test_lines_of_several_ranks_stay_whole_and_in_order() -> None:
    ended = horovodrun("-np", "3", PY, "-c", TALK)
    assert ended.code == 0, ended.err
    counts = [0, 0, 0]
    others: list[str] = []
    for line in ended.lines:
        match = re.fullmatch(r"\[(\d)\]<stdout>:(\d) (\d+) x*\.", line)
        if match is None:
            others.append(line)
            continue
        rank = int(match[1])
        assert match[2] == match[1]
        assert int(match[3]) == counts[rank]
        counts[rank] += 1
    assert counts == [10000] * 3
    long = [f"[{r}]<stdout>:" + "y" * 3_000_000 for r in range(3)]
    assert sorted(others) == sorted([*long, *(f"[{r}]<stdout>:last" for r in range(3))])


def test_output_goes_to_files_too(tmp_path: Path) -> None:
    talk = "import os, sys; print('out', os.environ['HOROVOD_RANK']); print('err', file=sys.stderr)"
    ended = horovodrun("-np", "11", "--output-filename", str(tmp_path / "a" / "b"), PY, "-c", talk)
    assert ended.code == 0, ended.err
    assert (tmp_path / "a/b/rank.03/stdout").read_text() == "out 3\n"
    assert (tmp_path / "a/b/rank.10/stderr").read_text() == "err\n"
    assert "[10]<stdout>:out 10" in ended.lines
    assert "[3]<stderr>:err" in ended.err.splitlines()


def test_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = horovodrun("-np", "2", "--output-filename", str(tmp_path / "file"), PY, "-c", "pass")
    assert ended.code == 1
    assert "cannot open the output of the ranks" in ended.err


def test_more_ranks_than_files_may_be_open() -> None:
    limited = ["sh", "-c", 'ulimit -n 20; exec "$@"', "sh", *HOROVODRUN, "-np", "50", PY, "-c", "pass"]
    ended = subprocess.run(limited, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 1
    assert "lower -np, or raise the limit (ulimit -n)" in ended.stderr


def test_standard_input_goes_to_rank_0_only() -> None:
    ended = horovodrun("-np", "2", PY, "-c", "import sys; print(repr(sys.stdin.read()))", stdin="hello")
    assert sorted(ended.lines) == ["[0]<stdout>:'hello'", "[1]<stdout>:''"]


def test_closed_standard_files_do_no_harm() -> None:
    ended = horovodrun("-np", "2", "bash", "-c", f"{PY} -m horovod.launch.cli -np 2 echo hi 0<&- 1>&- 2>&-; echo $?")
    assert sorted(ended.lines) == ["[0]<stdout>:0", "[1]<stdout>:0"]


def test_a_python_file_runs_with_the_users_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.executable, sys.argv)")
    path = f"{Path(PY).parent}{os.pathsep}{os.environ['PATH']}"
    ended = horovodrun("-np", "1", "train.py", "--lr", "1", "-v", cwd=tmp_path, PATH=path)
    assert ended.lines == [f"{Path(PY).parent / 'python'} ['train.py', '--lr', '1', '-v']"]


@pytest.mark.parametrize("command", [["python", "train.py"], ["train.py"], ["sh", "-c", "exec python3 train.py"]])
@pytest.mark.parametrize("is_activated", [False, True])
def test_an_environment_that_is_not_activated_brings_its_python(
    tmp_path: Path, command: list[str], is_activated: bool
) -> None:
    """Unless another one is activated, whose python is meant then."""
    (tmp_path / "train.py").write_text("import sys; print(sys.prefix)")
    other = tmp_path / "bin"
    other.mkdir()
    for name in ("python", "python3"):
        (other / name).write_text("#!/bin/sh\necho other\n")
        (other / name).chmod(0o755)
    activated = {"VIRTUAL_ENV": str(tmp_path)} if is_activated else {}
    kept = {name: text for name, text in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(
        [*HOROVODRUN, "-np", "1", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**kept, "PATH": f"{other}:/usr/bin:/bin", **activated},
    )
    assert done.stdout.split() == ["other" if is_activated else sys.prefix], done.stderr


def test_flags_about_other_hosts_earn_one_line() -> None:
    ended = horovodrun("-np", "1", "--ssh-port", "22", "--network-interface", "eth0", "true")
    assert ended.code == 0
    assert ended.err == "horovodrun: ignored on a single host: --ssh-port, --network-interface\n"


def test_threads_are_shared_out_and_one_line_says_so() -> None:
    show = "import os; print([os.environ[k + '_NUM_THREADS'] for k in ('OMP', 'MKL', 'OPENBLAS', 'NUMEXPR')])"
    unset = [word for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR") for word in ("-u", f"{library}_NUM_THREADS")]
    ended = horovodrun("-np", "2", "env", *unset, *HOROVODRUN, "-np", "2", PY, "-c", show)
    share = str(max(1, usable_cores() // 2))
    assert all(line.endswith(str([share] * 4)) for line in ended.lines)
    assert len(ended.err.splitlines()) == 2  # one line of each of two inner launchers
    assert f"OMP_NUM_THREADS={share}" in ended.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "-np is missing"),
        (("-np", "2"), "no command"),
        (("-np", "100000", "true"), "is more than 64 ranks for each of"),
        (("-np", "2", "-hostfile", "/no/such", "true"), "-hostfile /no/such: No such file"),
        (("-np", "2", "no-such-command"), "'no-such-command' was not found"),
        (("-np", "2", "/etc/passwd"), "'/etc/passwd' is not executable; `chmod +x /etc/passwd`"),
        (("-np", "2", "/etc"), "'/etc' is a folder"),
        (("-np", "2", ""), "the command '' is empty"),
        (("--doctor", "/no/such"), "--doctor /no/such: No such file or directory"),
        (("-np", "2", "no_such.py"), "'no_such.py' was not found in /"),
        (("-np", "2", "python train.py"), "without quotes around it, it is the command 'python' with arguments"),
    ],
    ids=str,
)
def test_wrong_command_line_is_one_line_and_exit_code_2(args: tuple[str, ...], said: str) -> None:
    ended = horovodrun(*args)
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1
    assert ended.out == ""


def test_what_shell_and_kernel_would_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without a first line for the kernel runs by Python; a program of this folder has no path."""
    for name in ("plain.py", "program"):
        (tmp_path / name).write_text("print('ran')\n")
        (tmp_path / name).chmod(0o755)
    assert horovodrun("-np", "1", "./plain.py", cwd=tmp_path).lines == ["ran"]
    assert (
        "was not found in PATH; for the one in this folder write `./program`"
        in horovodrun("-np", "1", "program", cwd=tmp_path).err
    )

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(UsageError, match=r"the command '/far/train\.py' cannot be read: Permission denied"):
        runnable(("/far/train.py",), "/bin", is_needed=True)


def test_wrong_setting_in_the_environment_is_one_error() -> None:
    ended = horovodrun("-np", "2", "true", HOROVOD_CACHE_CAPACITY="many")
    assert ended.code == 2
    assert "HOROVOD_CACHE_CAPACITY must be a whole number; received 'many'" in ended.err


@pytest.mark.parametrize("flag", ["-H", "--hosts"])
def test_hosts_that_are_all_this_one(flag: str) -> None:
    assert horovodrun("-np", "2", flag, "localhost:1,127.0.0.1:1", "--gloo", "true").code == 0


def test_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# here\n\nlocalhost slots=2\n")
    assert horovodrun("-np", "2", "-hostfile", "hosts", "--mpi", "true", cwd=tmp_path).code == 0


BUILT = (("TensorFlow", "tensorflow-cpu"), ("PyTorch", "torch"), ("Keras", "keras"), ("JAX", "jax"), ("NumPy", "numpy"))


def test_version_and_help_and_build() -> None:
    assert horovodrun("--version").lines[0] == f"khorovod {version('khorovod')} (API of Horovod {horovod.__version__})"
    assert "--fusion-threshold-mb" in horovodrun("--help").out
    built = horovodrun("--check-build")
    assert built.code == 0
    for title in (
        "Available Frameworks:",
        "Available Controllers:",
        "Available Tensor Operations:",
        *(f"[X] {title} {version(name)}\n" for title, name in BUILT),
        "[X] shared memory",
        "[X] MPI",
        "[X] Gloo",
        "between hosts over MPI where mpirun starts the ranks, else Gloo",
    ):
        assert title in built.out


def test_check_build_imports_no_framework(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('imported')")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    built = horovodrun("-cb", PYTHONPATH=os.pathsep.join(paths))
    assert (built.code, built.err) == (0, "")
    assert "[X] PyTorch" in built.out


def test_verbose_says_what_is_started() -> None:
    assert "starting 2 ranks on" in horovodrun("-np", "2", "--verbose", "true").err


CALLS_OR_NOT = """
import os, sys
if os.environ["HOROVOD_RANK"] in sys.argv[1:]:
    import horovod.numpy as hvd
    hvd.init({own})
"""


MODES = {
    "fixed": ["-np", "2"],
    "elastic": ["-np", "2", "--min-np", "1"],
    "elastic that grows": ["--min-np", "1", "--max-np", "2", "-H", "localhost:2"],
    "hosts": ["-np", "2", "-H", "localhost:1,127.0.0.2:1"],
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_ranks_that_never_call_init_are_named(mode: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CALLS_OR_NOT.format(own=""))
    assert "horovodrun: no rank has called hvd.init()" in horovodrun(*mode, PY, str(script)).err
    for command in ([PY, str(script), "0", "1"], ["echo", PY], [PY, "-c", "print(1)"]):
        assert "hvd.init()" not in horovodrun(*mode, *command).err


def test_one_rank_alone_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CALLS_OR_NOT.format(own="comm=[0]"))
    ended = horovodrun("-np", "2", PY, str(script), "0")
    assert "horovodrun: rank 1 has not called hvd.init(): each" in ended.err
    assert ended.code == 0


# A line of its own lets the ranks end.
TOLD = """
import pathlib, sys
from horovod.launch import cli, supervision
supervision.ALONE_S, say = 0.2, supervision.Supervision.say
supervision.Supervision.say = lambda job, line: (say(job, line), pathlib.Path("told").touch())
sys.exit(cli.main())
"""


@pytest.mark.parametrize("mode", ["fixed", "elastic"])
def test_ranks_that_train_alone_are_named_while_they_run(mode: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import pathlib, time\nwhile not pathlib.Path('told').exists(): time.sleep(0.01)\n")
    ended = horovodrun(*MODES[mode], PY, str(script), program=[PY, "-c", TOLD], cwd=tmp_path)
    assert ended.code == 0
    assert ended.err.count("horovodrun: no rank has called hvd.init() in 0.2 seconds: each") == 1
