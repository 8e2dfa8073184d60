"""Contenders alternate in rounds, figures belong to the right one, and one that cannot take part is named."""

from __future__ import annotations

from typing import Any

import pytest
from bench_doubles import LocalAgreement, ScriptedContender
from harness import on_ranks

from horovod.bench.cases import OPS, Case
from horovod.bench.collective import run_cases
from horovod.bench.control import Agreement
from horovod.bench.on_torch import Gloo, Ours

TURNS: Any = {"rounds": 3, "round_s": 0.01}


def nothing(done: int, total: int, text: str) -> None:
    """Progress that nobody watches."""


def test_contenders_take_turns_in_every_round() -> None:
    log: list[str] = []
    ours, peer = ScriptedContender("horovod", 1e-3, log), ScriptedContender("peer", 4e-3, log)
    run_cases([Case("allreduce", 64)], [ours, peer], LocalAgreement(), nothing, **TURNS)
    rounds = [entry for entry in log if entry.endswith("measure")][-6:]
    assert rounds == ["horovod.measure", "peer.measure"] * 3
    assert log[-2:] == ["horovod.release", "peer.release"]


def test_a_row_holds_medians_and_ratios() -> None:
    ours, peer = (ScriptedContender(name, ms / 1e3, []) for name, ms in (("horovod", 1), ("peer", 4)))
    [row] = run_cases([Case("allreduce", 4 << 20)], [ours, peer], LocalAgreement(2), nothing, **TURNS)
    assert row["results"]["horovod"]["median_s"] == 1e-3
    assert row["ratios"] == {"horovod": {"peer": pytest.approx(4.0)}}


def test_a_contender_that_cannot_is_skipped_with_its_reason() -> None:
    log: list[str] = []
    ours = ScriptedContender("horovod", 1e-3, log)
    peer = ScriptedContender("peer", 1e-3, log, refuses="bfloat16")
    [row] = run_cases([Case("allreduce", 64, "bfloat16")], [ours, peer], LocalAgreement(), nothing, **TURNS)
    assert row["skipped"] == {"peer": "refused"}
    assert set(row["results"]) == {"horovod"}
    assert "peer.prepare" not in log


@pytest.mark.parametrize("step", ["prepare", "measure"])
def test_a_contender_that_dies_does_not_stop_the_others(step: str) -> None:
    ours, peer = ScriptedContender("horovod", 1e-3, []), ScriptedContender("peer", 1e-3, [], dies_at=step)
    rows = run_cases([Case("allreduce", 64), Case("allreduce", 128)], [ours, peer], LocalAgreement(), nothing, **TURNS)
    assert [row["skipped"] for row in rows] == [{"peer": "died"}] * 2
    assert [set(row["results"]) for row in rows] == [{"horovod"}] * 2


def test_a_case_larger_than_memory_is_skipped_by_all() -> None:
    log: list[str] = []
    [row] = run_cases(
        [Case("allgather", 1 << 50)], [ScriptedContender("horovod", 1.0, log)], LocalAgreement(), nothing, **TURNS
    )
    assert "of memory" in row["skipped"]["horovod"]
    assert not log


@pytest.mark.slow
@on_ranks(2)
def test_every_operation_is_checked_and_timed_in_process() -> None:
    import horovod.torch as hvd

    control = Agreement(hvd)
    contenders = [Ours(control), Ours(control, arena=True), Gloo(control)]
    cases = [Case(op, 256, dtype, 3 if op == "async" else 1) for op in OPS for dtype in ("float32", "bfloat16")]
    try:
        rows = run_cases(cases, contenders, control, nothing, rounds=1, round_s=1e-4)
    finally:
        contenders[-1].close()
    names = {"horovod", "horovod arena", "gloo"}
    assert [set(row["results"]) for row in rows] == [names] * 2 * len(OPS)
