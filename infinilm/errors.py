"""The errors that the package raises.

A message names the parameter, the value seen and the remedy. Bad input is a `ValueError` or
`TypeError` as well, so callers need not know these names to catch it.
"""


class InfinilmError(Exception):
    """The base class of all of the package's errors."""


class InvalidValueError(InfinilmError, ValueError):
    """A parameter has a value that is out of range or not allowed."""


class InvalidTypeError(InfinilmError, TypeError):
    """A parameter has the wrong type, or its name is unknown."""


class PromptTooLongError(InvalidValueError):
    """A prompt can never be served with the engine's settings."""


class CheckpointError(InfinilmError, ValueError):
    """A model file or directory is missing, damaged, unsafe or not supported."""


class EngineError(InfinilmError, RuntimeError):
    """The engine cannot do this in its present state."""


class OutOfMemoryError(EngineError):
    """A step needed more memory than the device had left."""


class WorkerDiedError(EngineError):
    """A rank's process has died, and the engine can't be used any more."""


class MissingTorchError(InfinilmError, ImportError):
    """Something needs torch, which is not installed."""
