"""What ranks tell each other, between threads that each hold a group of their own."""

import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from ranks import connected, in_threads, run_ranks

from infinilm.distributed import CommunicationGroup, RankInfo
from infinilm.distributed import group as group_module
from infinilm.distributed.group import SINGLE, CommunicationError
from infinilm.errors import EngineError

SIZES = [2, 3, 4]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64]


def own(rank: int, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers, whose sums every dtype holds exactly."""
    return (torch.arange(torch.Size(shape).numel()).view(shape) + 10 * rank).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_collectives(size: int, dtype: torch.dtype) -> None:
    def talk(group: CommunicationGroup) -> dict[str, torch.Tensor]:
        mine = own(group.rank, dtype=dtype)
        group.barrier()
        return {
            "sum": group.all_reduce(mine.clone()),
            "all": group.all_gather(mine),
            "all rows": group.all_gather(mine, dim=0),
            "gathered": group.gather(mine),
            "gathered rows": group.gather(mine, dim=0),
            "of the last": group.broadcast(mine.clone(), root=size - 1),
            "of the first": group.broadcast(mine.clone()),
        }

    parts = [own(rank, dtype=dtype) for rank in range(size)]
    for rank, heard in enumerate(run_ranks(size, talk)):
        whole, rows = torch.cat(parts, dim=-1), torch.cat(parts, dim=0)
        nothing = torch.empty(0, dtype=dtype)
        assert heard["sum"].equal(torch.stack(parts).sum(0).to(dtype))
        assert heard["all"].equal(whole)
        assert heard["all rows"].equal(rows)
        assert heard["gathered"].equal(whole if rank == 0 else nothing)
        assert heard["gathered rows"].equal(rows if rank == 0 else nothing)
        assert heard["of the last"].equal(parts[-1])
        assert heard["of the first"].equal(parts[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_sums_in_order_do_not_depend_on_the_tensor_around_them(dtype: torch.dtype) -> None:
    numbers = torch.randn(4, 1000, 6, generator=torch.Generator().manual_seed(0)) * 100

    def talk(group: CommunicationGroup) -> list[torch.Tensor]:
        group.is_ordered = True
        mine = numbers[group.rank].to(dtype)
        return [group.all_reduce(mine[:count].clone()) for count in (1000, 1, 2, 7, 513)]

    expected = sum(part.to(dtype) if dtype == torch.int64 else part.to(dtype).float() for part in numbers)
    assert isinstance(expected, torch.Tensor)
    for sums in run_ranks(4, talk):
        for total in sums:
            assert total.equal(expected[: len(total)].to(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 4), (3, 1, 5), (300, 1000)], ids=str)
def test_any_shape(shape: tuple[int, ...]) -> None:
    def talk(group: CommunicationGroup) -> tuple[torch.Tensor, torch.Tensor]:
        return group.all_reduce(own(group.rank, shape)), group.broadcast(own(group.rank, shape), root=1)

    for total, second in run_ranks(2, talk):
        assert total.equal(own(0, shape) + own(1, shape))
        assert second.equal(own(1, shape))


def test_tensors_that_do_not_lie_in_a_row_are_changed_in_place() -> None:
    def talk(group: CommunicationGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        around = torch.zeros(4, 6)
        around[1:3, ::2] = own(group.rank)
        total = group.all_reduce(around[1:3, ::2])
        assert total.data_ptr() == around[1:3, ::2].data_ptr()
        told = group.broadcast(own(group.rank).t(), root=1)
        return around, told, group.gather(own(group.rank).t())

    for rank, (around, told, gathered) in enumerate(run_ranks(2, talk)):
        expected = torch.zeros(4, 6)
        expected[1:3, ::2] = own(0) + own(1)
        assert around.equal(expected)
        assert told.equal(own(1).t())
        assert rank > 0 or gathered.equal(torch.cat([own(0).t(), own(1).t()], dim=-1))


def test_a_group_of_one_has_nothing_to_tell() -> None:
    tensor = own(0)
    for group in (SINGLE, CommunicationGroup()):
        assert (group.rank, group.size, group.info.device) == (0, 1, torch.device("cpu"))
        assert group.all_reduce(tensor) is tensor
        assert group.all_gather(tensor) is group.gather(tensor) is group.broadcast(tensor) is tensor
        group.barrier()
        group.leave()
        group.barrier()


def test_a_group_without_a_store_is_a_description() -> None:
    group = CommunicationGroup(RankInfo(1, 3))
    assert (group.rank, group.size) == (1, 3)
    for talk in (group.barrier, lambda: group.all_reduce(own(0)), lambda: group.gather(own(0))):
        with pytest.raises(CommunicationError, match="rank 1 is not connected to the other 2"):
            talk()
    with pytest.raises(
        EngineError, match="a group of 3 ranks needs a store for the rendezvous; use make_store or join_store"
    ):
        group.join(0)


def test_who_waits_for_a_rank_that_leaves_gets_an_error_and_all_can_meet_again() -> None:
    with connected(3) as groups:

        def fail(group: CommunicationGroup) -> str:
            if group.rank == 1:
                time.sleep(0.1)  # the others are waiting by now
                group.leave()
                return "left"
            with pytest.raises(CommunicationError, match=rf"rank {group.rank} lost its connection to the others"):
                group.all_reduce(own(group.rank))
            group.leave()
            with pytest.raises(CommunicationError, match=rf"rank {group.rank} is not connected"):
                group.all_reduce(own(group.rank))
            return "was left"

        def meet(rendezvous: int, group: CommunicationGroup) -> torch.Tensor:
            group.join(rendezvous)
            return group.all_reduce(own(group.rank))

        for rendezvous in range(1, 4):
            assert in_threads(fail, groups) == ["was left", "left", "was left"]
            assert all(total.equal(own(0) + own(1) + own(2)) for total in in_threads(partial(meet, rendezvous), groups))


def test_groups_of_one_process_do_not_hear_each_other() -> None:
    with connected(2) as ours, connected(2) as theirs:

        def talk(group: CommunicationGroup) -> torch.Tensor:
            sign = 1 if group in ours else -1
            for _ in range(20):
                total = group.all_reduce(sign * own(group.rank))
            return total

        totals = in_threads(talk, [*ours, *theirs])
        expected = own(0) + own(1)
        assert [t.equal(e) for t, e in zip(totals, [expected] * 2 + [-expected] * 2, strict=True)] == [True] * 4


def test_a_receiver_waits_longer_than_a_rendezvous_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline stage may compute for long before it sends."""
    monkeypatch.setattr(group_module, "JOIN_TIMEOUT", timedelta(seconds=1))

    def talk(group: CommunicationGroup) -> float:
        if group.rank == 0:
            time.sleep(1.5)
            group.send(torch.ones(3), 1)
            return 1.0
        return float(group.receive(torch.zeros(3), 0)[0])

    assert run_ranks(2, talk) == [1.0, 1.0]
