"""InfiniLM: a fast, readable LLM inference engine in Python.

>>> from infinilm import LLM, SamplingParams
>>> llm = LLM()  # the embedded model; or a directory, a .gguf file, a hub id
>>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].text
"""

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from infinilm.config import Config
from infinilm.outputs import CompletionOutput, RequestOutput
from infinilm.platforms import DeviceType, require_torch
from infinilm.sampling_params import SamplingParams
from infinilm.structured_output import Reasoning, StructuredOutput

if TYPE_CHECKING:
    from infinilm.engine.async_engine import AsyncLLM
    from infinilm.engine.llm_engine import LLM, LLMEngine
    from infinilm.lowlevel.infer_engine import InferEngine

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Config",
    "DeviceType",
    "InferEngine",
    "LLMEngine",
    "Reasoning",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
]

# Imported on first use, because some need torch, which takes a second to import.
_LAZY = {
    "LLM": "infinilm.engine.llm_engine",
    "LLMEngine": "infinilm.engine.llm_engine",
    "AsyncLLM": "infinilm.engine.async_engine",
    "InferEngine": "infinilm.lowlevel.infer_engine",
}
_ROOMS = ("cache", "debug", "distributed", "engine", "generation", "layers", "lib", "models")


def __getattr__(name: str) -> Any:
    with require_torch(f"infinilm.{name}"):
        if name in _LAZY:
            return getattr(import_module(_LAZY[name]), name)
        if name in _ROOMS:
            return import_module(f"infinilm.{name}")
    raise AttributeError(f"module 'infinilm' has no attribute {name!r}")


class _LogPrinter(logging.Handler):
    """Prints the engine's logs, unless the program has set up logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(f"infinilm: {self.format(record)}", file=sys.stderr)


logging.getLogger("infinilm").addHandler(_LogPrinter())
logging.getLogger("infinilm").setLevel(logging.INFO)
