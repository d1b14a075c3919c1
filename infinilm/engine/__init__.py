"""The engines and their parts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinilm.distributed.config import DistConfig
    from infinilm.engine.block_manager import BlockManager
    from infinilm.engine.llm_engine import LLMEngine
    from infinilm.engine.scheduler import Scheduler
    from infinilm.engine.sequence import Sequence
    from infinilm.executor.model_runner import ModelRunner
    from infinilm.executor.rank_worker import RankWorker
    from infinilm.lowlevel.infer_engine import InferEngine

__all__ = [
    "BlockManager",
    "DistConfig",
    "InferEngine",
    "LLMEngine",
    "ModelRunner",
    "RankWorker",
    "Scheduler",
    "Sequence",
]

# Each name is imported on first use, because scheduling needs no torch.
_FILES = {
    "BlockManager": "infinilm.engine.block_manager",
    "DistConfig": "infinilm.distributed.config",
    "InferEngine": "infinilm.lowlevel.infer_engine",
    "LLMEngine": "infinilm.engine.llm_engine",
    "ModelRunner": "infinilm.executor.model_runner",
    "RankWorker": "infinilm.executor.rank_worker",
    "Scheduler": "infinilm.engine.scheduler",
    "Sequence": "infinilm.engine.sequence",
}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(_FILES[name]), name)
    raise AttributeError(f"module 'infinilm.engine' has no attribute {name!r}")
