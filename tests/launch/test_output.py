"""Whole lines, labels, progress bars, prompts: bytes in, bytes out."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import HOROVODRUN, horovodrun

from horovod.launch.cli import main
from horovod.launch.output import FileSink, OutputSink, RankStream, TextSink, Tracebacks
from horovod.launch.plan import Rotation
from horovod.launch.rotation import OutputFile
from horovod.notebook.messages import end_mark
from horovod.notebook.ranks import GatheredOutput


class MemorySink(OutputSink):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def put(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [
        ([b"a\n"], b"0:a\n"),
        ([b"a", b"b", b"\n"], b"0:ab\n"),
        ([b"a\nb\n\nc"], b"0:a\n0:b\n0:\n0:c\n"),
        ([b"a\r\nb\r\n"], b"0:a\n0:b\n"),
        ([b"a\r", b"\nb\n"], b"0:a\n0:b\n"),
        ([b"\r10%", b"\r20%", b"\r30%\n"], b"0:10%\r0:20%\r0:30%\n"),
        ([b"10%\r", b"20%\r", b"\n"], b"0:10%\r0:20%\n"),
        ([b"10%\r", b"20%\r"], b"0:10%\r0:20%\n"),
        ([b"no end"], b"0:no end\n"),
        ([b"\xff\xfe\n"], b"0:\xff\xfe\n"),
        ([], b""),
    ],
    ids=repr,
)
def test_lines_are_labelled(chunks: list[bytes], shown: bytes) -> None:
    sink = MemorySink()
    stream = RankStream(sink, "0:")
    for chunk in chunks:
        stream.feed(chunk)
    stream.finish()
    assert sink.data == shown


def test_a_progress_bar_of_a_notebook_goes_on_when_another_rank_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    output = GatheredOutput()
    drawing, other = (RankStream(output.sinks[1], f"[{rank}] ") for rank in (0, 1))
    drawing.feed(b"\r10%\r20%")
    other.feed(end_mark(1, 1, 2))
    drawing.feed(b"\r30%\r")
    drawing.show_partial()
    drawing.feed(end_mark(1, 0, 2))
    output.show()
    output.close()
    assert capsys.readouterr().err == "[0] 10%\r[0] 20%\r[0] 30%\r\n"
    assert output.ended == {(1, 0, 2), (1, 1, 2)}


ABSL = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
ONEDNN = b"I0000 00:00:1795333700.061875   11756 port.cc:153] oneDNN custom operations are on. You may see slight\n"


@pytest.mark.parametrize("cut", [1, len(ABSL), len(ABSL + ONEDNN) - 1])
def test_what_tensorflow_says_unasked_is_left_out(cut: int) -> None:
    noise, others = ABSL + ONEDNN, b"I0000 00:00:1 2 port.cc:153] other\nsaid: " + ONEDNN
    for is_quiet, shown in ((True, b""), (False, b"0:" + ABSL + b"0:" + ONEDNN)):
        sink = MemorySink()
        stream = RankStream(sink, "0:", is_repeat=lambda text: False, is_quiet=is_quiet)
        stream.feed(noise[:cut])
        stream.feed(noise[cut:] + others)
        stream.finish()
        assert sink.data == shown + others.replace(b"I0000 00:00:1 2", b"0:I0000 00:00:1 2").replace(b"said", b"0:said")
        assert len(stream.last_lines(9)) == (2 if is_quiet else 4)


@pytest.mark.parametrize("flags", [(), ("--min-np", "1")])
def test_jobs_of_both_kinds_leave_it_out_unless_the_user_wants_it(flags: tuple[str, ...]) -> None:
    script = f"import os; os.write(2, {ABSL + ONEDNN!r})"
    for level, count in ((("-u", "TF_CPP_MIN_LOG_LEVEL"), 0), (("TF_CPP_MIN_LOG_LEVEL=0",), 4)):
        program = ("env", *level, *HOROVODRUN)
        ended = horovodrun("-np", "2", *flags, sys.executable, "-c", script, program=program)
        assert ended.err.count("absl::") + ended.err.count("oneDNN") == count, ended.err


def test_a_stamp_stands_before_each_label() -> None:
    sink = MemorySink()
    times = iter(["Mon ", "Tue "])
    stream = RankStream(sink, "0:", stamp=lambda: next(times))
    stream.feed(b"a\nb\nc")
    stream.finish()
    assert sink.data == b"Mon 0:a\nMon 0:b\nTue 0:c\n"


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=6).map(lambda b: b.replace(b"\r", b"\n")))))
def test_streams_never_mix_within_a_line(pieces: list[tuple[int, bytes]]) -> None:
    sink = MemorySink()
    streams = [RankStream(sink, f"{i}:") for i in range(3)]
    for i, piece in pieces:
        streams[i].feed(piece)
    for stream in streams:
        stream.finish()
    for i in range(3):
        sent = b"".join(piece for j, piece in pieces if j == i)
        lines = [line[2:] for line in sink.data.split(b"\n") if line.startswith(b"%d:" % i)]
        assert lines == sent.removesuffix(b"\n").split(b"\n") if sent else not lines


def test_a_bar_is_ended_before_another_rank_speaks() -> None:
    sink = MemorySink()
    bar, other = RankStream(sink, "0:"), RankStream(sink, "1:")
    bar.feed(b"\r10%")
    bar.feed(b"\r20%")
    other.feed(b"hello\n")
    bar.feed(b"\r30%\n")
    assert sink.data == b"0:10%\r\n1:hello\n0:20%\r0:30%\n"


def test_a_prompt_is_shown_and_its_line_goes_on() -> None:
    sink = MemorySink()
    stream = RankStream(sink, "0:")
    stream.feed(b"name? ")
    stream.show_partial()
    assert sink.data == b"0:name? "
    stream.feed(b"hi\nbye\n")
    assert sink.data == b"0:name? hi\n0:bye\n"


def test_a_bar_goes_on_after_it_was_shown_half() -> None:
    sink = MemorySink()
    stream = RankStream(sink, "0:")
    stream.feed(b"\r10%")
    stream.show_partial()
    stream.feed(b"\r20%\n")
    assert sink.data == b"0:10%\r0:20%\n"


def test_a_prompt_that_another_rank_interrupts_begins_again() -> None:
    sink = MemorySink()
    stream, other = RankStream(sink, "0:"), RankStream(sink, "1:")
    stream.feed(b"name? ")
    stream.show_partial()
    other.feed(b"x\n")
    stream.feed(b"hi\n")
    assert sink.data == b"0:name? \n1:x\n0:hi\n"


def test_without_label_bytes_pass_as_they_come() -> None:
    sink = MemorySink()
    stream = RankStream(sink)
    stream.feed(b"\r10%")
    assert sink.data == b"\r10%"


def test_file_gets_everything_as_it_comes(tmp_path: Path) -> None:
    file = OutputFile(tmp_path / "f", Rotation())
    stream = RankStream(MemorySink(), "0:", file)
    stream.feed(b"a\r")
    stream.feed(b"b")
    stream.finish()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write(b"after its end")
    assert (tmp_path / "f").read_bytes() == b"a\rb"


def test_a_full_disk_is_said_once_and_does_not_stop_the_rank() -> None:
    sink = MemorySink()
    stream = RankStream(sink, "0:", OutputFile(Path("/dev/full"), Rotation()))
    stream.feed(b"a\n")
    stream.feed(b"b\n")
    assert sink.data.count(b"horovodrun: /dev/full misses output from here on: No space left on device\n") == 1
    assert sink.data.endswith(b"0:a\n0:b\n")


def test_what_horovodrun_itself_cannot_write_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        sink = FileSink(full.fileno())
        sink.put(b"a\n")
        sink.put(b"b\n")
    assert sink.broken
    assert capfd.readouterr().err == "horovodrun: the output of the ranks is lost: No space left on device\n"


def test_a_question_whose_answer_is_lost_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--doctor", str(tmp_path)]) == 1
    assert capfd.readouterr().err == "horovodrun: error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\nc\n", ["b", "c"]),
        (b"a\n\r10%\r20%", ["a", "20%"]),
        (b"\x1b[31mred\x1b[0m\n", ["red"]),
        (b"", []),
        (b"\n\n", []),
    ],
)
def test_last_lines(data: bytes, lines: list[str]) -> None:
    stream = RankStream(MemorySink(), "0:")
    stream.feed(data)
    assert stream.last_lines(2) == lines


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            pass


def test_a_reader_that_does_not_read_holds_nobody_up(pipe: tuple[int, int]) -> None:
    sink = FileSink(pipe[1])
    data = os.urandom(3 << 20)
    sink.put(data)
    assert sink.backlog
    assert sink.full
    read = b""
    while sink.backlog:
        read += os.read(pipe[0], 1 << 16)
        sink.flush()
    os.set_blocking(pipe[0], False)
    while len(read) < len(data):
        read += os.read(pipe[0], 1 << 16)
    assert read == data
    assert not sink.full


def test_a_reader_that_is_gone_breaks_the_sink(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    sink = FileSink(pipe[1])
    stream = RankStream(sink, "0:")
    assert stream.wanted
    stream.feed(b"x\n")
    assert sink.broken
    assert not sink.backlog
    assert not stream.wanted


def test_text_stream_gets_text() -> None:
    text = io.StringIO()
    sink = TextSink(text)
    data = "größer\n".encode()
    sink.put(data[:3])
    sink.put(data[3:])
    assert text.getvalue() == "größer\n"


def test_closed_text_stream_breaks_the_sink() -> None:
    text = io.StringIO()
    text.close()
    sink = TextSink(text)
    sink.put(b"x")
    assert sink.broken


TRACEBACK = b'Traceback (most recent call last):\n  File "s.py", line 1, in <module>\nValueError: bad\n'


def _labelled(rank: int, text: bytes) -> bytes:
    return b"".join(b"%d:" % rank + line for line in text.splitlines(keepends=True))


def _streams(sink: OutputSink, size: int) -> tuple[Tracebacks, list[RankStream]]:
    tracebacks = Tracebacks()
    partials = [functools.partial(tracebacks.is_repeat, rank) for rank in range(size)]
    return tracebacks, [RankStream(sink, f"{rank}:", is_repeat=partials[rank]) for rank in range(size)]


def test_equal_tracebacks_are_shown_once_with_the_ranks() -> None:
    sink = MemorySink()
    tracebacks, streams = _streams(sink, 4)
    for stream in streams:
        stream.feed(b"before\n" + TRACEBACK[:40])
    for stream in streams[:3]:
        stream.feed(TRACEBACK[40:])
    streams[3].feed(TRACEBACK[40:].replace(b"bad", b"worse"))
    for stream in streams:
        stream.finish()
    worse = TRACEBACK.replace(b"bad", b"worse")
    before = b"".join(_labelled(rank, b"before\n") for rank in range(4))
    assert sink.data == before + _labelled(0, TRACEBACK) + _labelled(3, worse)
    assert tracebacks.summary() == ["ranks 1, 2 ended with the same traceback as rank 0"]
    assert tracebacks.summary(lambda rank: rank + 5) == ["ranks 6, 7 ended with the same traceback as rank 5"]
    ranks = {0: None, 1: 4, 2: None}
    assert tracebacks.summary(ranks.get) == ["rank 4 and a new process ended with the same traceback as a new process"]


@pytest.mark.parametrize("own", [b"bad (rank %d, at s.py:1)", b"bad, while rank %d waited in allreduce 'g'"])
def test_tracebacks_that_differ_by_the_own_rank_are_equal(own: bytes) -> None:
    sink = MemorySink()
    tracebacks, streams = _streams(sink, 3)
    for rank, named in enumerate((0, 1, 1)):
        streams[rank].feed(TRACEBACK.replace(b"bad", own % named))
        streams[rank].finish()
    assert tracebacks.summary() == ["rank 1 ended with the same traceback as rank 0"]
    assert tracebacks.only() == set()
    assert sink.data.count(b"bad") == 2


def test_tracebacks_of_muted_ranks_are_not_counted() -> None:
    sink = MemorySink()
    tracebacks, streams = _streams(sink, 2)
    for stream in streams:
        stream.feed(TRACEBACK[:40])
        stream.mute()
        stream.feed(TRACEBACK[40:])
        stream.finish()
    assert sink.data == b""
    assert tracebacks.summary() == []


def test_a_traceback_after_which_the_stream_goes_on_is_shown_by_everybody() -> None:
    sink = MemorySink()
    tracebacks, streams = _streams(sink, 2)
    for stream in streams:
        stream.feed(TRACEBACK)
        assert stream.hold_until is not None
        stream.let_go()
        stream.feed(b"after\n")
        stream.finish()
    assert sink.data == _labelled(0, TRACEBACK + b"after\n") + _labelled(1, TRACEBACK + b"after\n")
    assert tracebacks.summary() == []
