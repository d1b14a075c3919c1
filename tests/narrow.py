"""Types that a test knows more closely than the annotations do. Each function asserts what it promises."""

from typing import TypeVar

from infinilm.distributed.shard import Shard, WeightShard
from infinilm.executor.executor import Executor
from infinilm.executor.local import LocalExecutor
from infinilm.executor.rank_worker import RankWorker

T = TypeVar("T")


def present(value: T | None) -> T:
    assert value is not None
    return value


def worker_of(executor: Executor) -> RankWorker:
    """Rank 0, which is in this process."""
    assert isinstance(executor, LocalExecutor)
    return executor.worker


def dense(shard: Shard) -> WeightShard:
    assert isinstance(shard, WeightShard)
    return shard
