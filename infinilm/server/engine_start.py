"""Starts the engine's process. It imports little, so a command can start the engine first and import the rest later."""

from infinilm.processes import ChildProcess

SOCKET_BUFFER_BYTES = 4 << 20
"""Enough for many steps, so that the engine never waits for an HTTP process that is busy for a moment."""


def start_engine_process() -> ChildProcess:
    """Start a process that imports the engine's modules and waits for `Start`."""
    return ChildProcess("infinilm.server.engine_process", output="echo", socket_buffer_bytes=SOCKET_BUFFER_BYTES)
