"""``ElasticSampler``: each sample of an epoch is dealt once, whatever the sizes of the job."""

from __future__ import annotations

import pytest
import torch
from elastic_double import Job

import horovod.torch as hvd
from horovod import context


@pytest.mark.parametrize(("count", "size", "batch_size"), [(5, 2, 4), (11, 3, 3), (50, 3, 7)])
def test_ranks_that_record_their_own_last_batches_agree(
    count: int, size: int, batch_size: int, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(size):
        monkeypatch.setattr(context, "world", lambda: type("W", (), {"rank": rank, "size": size}))
        sampler = hvd.elastic.ElasticSampler(range(count))
        sampler.load_state_dict({"epoch": 1, "processed_num": 0, "batch_size": batch_size})
        for number, batch in enumerate(torch.utils.data.DataLoader(range(count), batch_size, sampler=sampler)):
            sampler.record_batch(number, len(batch))
        assert sampler.processed_num == count


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_sampler_deals_what_is_left(batch_size: int, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three ranks remain in the middle of an epoch; a data loader makes the batches."""
    count = 50
    used: list[int] = []

    def epoch(state: dict[str, int], size: int, batches: int) -> dict[str, int]:
        ends, taken = [], []
        for rank in range(size):
            world = context.world()
            monkeypatch.setattr(context, "world", lambda: type("W", (), {"rank": rank, "size": size}))
            sampler = hvd.elastic.ElasticSampler(range(count), seed=5)
            sampler.load_state_dict(state)
            loader = torch.utils.data.DataLoader(range(count), batch_size, sampler=sampler)
            taken.append([])
            for number, batch in enumerate(loader):
                if number == batches:
                    break
                taken[-1].append(batch.tolist())
                sampler.record_batch(number, batch_size)
            ends.append(sampler.state_dict())
            monkeypatch.setattr(context, "world", lambda: world)
        assert len({len(each) for each in taken}) == 1, "all ranks have the same number of batches"
        used.extend(sample for own in taken for batch in own for sample in batch)
        assert all(end == ends[0] for end in ends)
        return ends[0]

    state = epoch({"epoch": 1, "processed_num": 0, "batch_size": batch_size}, 3, 2)
    epoch(state, 2, count)
    assert sorted(used) == list(range(count))


def test_a_sampler_keeps_an_epoch_that_has_begun(job: Job) -> None:
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    assert (list(sampler), len(sampler), sampler.total_size) == (list(range(8)), 8, 8)
    sampler.set_epoch(3)
    sampler.record_batch(0, 3)
    sampler.set_epoch(3)
    assert (list(sampler), sampler.remaining_indices) == ([3, 4, 5, 6, 7], [3, 4, 5, 6, 7])
    assert sampler.get_indices(1, 2) == [5, 6]
    sampler.record_indices([3, 4, 5, 6, 7])
    sampler.set_epoch(3)
    assert len(sampler) == 8
    sampler.record_batch(0, 3)
    sampler.set_epoch(4)
    assert sampler.processed_num == 0
