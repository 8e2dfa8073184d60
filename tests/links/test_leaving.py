"""A rank that leaves is not told that another one, who was only quick to follow, was the reason."""

from __future__ import annotations

import pytest
from interleaving import Stage
from pairs import Ranks, on_stage


def test_who_leaves_after_this_rank_is_not_why_its_operations_fail() -> None:
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage({}, frozenset())
        on_stage(stage, patch)
        ranks = Ranks(stage, 2)
        try:
            first, second = [engine.link.channel for engine in ranks.engines]

            def leave() -> bool:
                handle = ranks.submit(0, "alone")
                log = ranks.engines[0]._log
                log.accept(False)
                log.step()
                first.leave("done")
                second.leave("done, too")
                log.step()
                return handle.done

            (actor,) = stage.play(leave)
            assert actor.result is False
            ranks.stop()
        finally:
            stage.close()
