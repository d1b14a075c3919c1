"""InfiniLM on Ray. Importing this needs the extra: `pip install 'infinilm[cluster]'`."""

from infinilm.cluster.engine_actor import engine_actor

__all__ = ["engine_actor"]
