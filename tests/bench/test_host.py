"""Facts of the machine, and who else was at work on it."""

from __future__ import annotations

import json

import pytest

from horovod.bench.host import Load, host_facts, others_cores


def test_facts_are_plain_and_do_not_name_the_machine() -> None:
    facts = host_facts()
    assert {"cpu", "cores", "caches", "versions", "load_before"} <= set(facts)
    assert "hostname" not in json.dumps(facts)


def test_others_are_what_the_job_did_not_use() -> None:
    start, end = Load(10.0, 100.0, 1.0, 0.0), Load(20.0, 118.0, 9.0, 1.0)
    used = end.since(start)
    assert others_cores(used, 15.0) == {"programs": pytest.approx(0.3), "stolen": pytest.approx(0.1)}
    assert others_cores(used, 18.2)["programs"] == 0.0
