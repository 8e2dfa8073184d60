"""Facts of the machine."""

from __future__ import annotations

import json

from horovod.bench.host import host_facts


def test_facts_are_plain_and_do_not_name_the_machine() -> None:
    facts = host_facts()
    assert {"cpu", "cores", "caches", "versions", "load_before"} <= set(facts)
    assert "hostname" not in json.dumps(facts)
