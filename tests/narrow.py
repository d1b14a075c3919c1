"""Types that a test knows more closely than the annotations do. Each function asserts what it promises."""

from typing import TypeVar

from infinilm.distributed.shard import Shard, WeightShard
from infinilm.executor.executor import Executor
from infinilm.executor.local import LocalExecutor
from infinilm.executor.native_worker import NativeWorker
from infinilm.executor.rank_worker import RankWorker

T = TypeVar("T")


def present(value: T | None) -> T:
    assert value is not None
    return value


def worker_of(executor: Executor) -> RankWorker:
    """Rank 0, which is in this process."""
    assert isinstance(executor, LocalExecutor)
    assert isinstance(executor.worker, RankWorker)
    return executor.worker


def native_worker_of(executor: Executor) -> NativeWorker:
    """The rank that runs a quantised model without torch."""
    assert isinstance(executor, LocalExecutor)
    assert isinstance(executor.worker, NativeWorker)
    return executor.worker


def dense(shard: Shard) -> WeightShard:
    assert isinstance(shard, WeightShard)
    return shard
