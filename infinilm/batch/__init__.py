"""Batch jobs: prompts or OpenAI batch lines from a file, answers into a file. `docs/batch.md` describes them."""

from infinilm.batch.job import BatchSummary
from infinilm.batch.run import run

__all__ = ["BatchSummary", "run"]
