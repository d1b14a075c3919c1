"""The process of one rank other than 0: `python -m infinilm.engine.rank_process <socket>`.

It takes commands until it is told to stop or the engine's process is gone.
"""

import logging
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch

from infinilm.distributed.channel import Channel, ChannelClosedError, Message
from infinilm.distributed.group import CommunicationGroup, RankInfo, join_store
from infinilm.engine.memory import free_memory_bytes
from infinilm.engine.rank_worker import Command, RankWorker
from infinilm.models.registry import register_described


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a rank has to know to begin with."""

    rank: int
    size: int
    device: str
    dtype: str
    attention_backend: str
    port: int
    """Where the ranks meet."""
    num_threads: int


def start_worker(settings: RankSettings) -> RankWorker:
    """Set up the device and meet the other ranks."""
    torch.set_num_threads(settings.num_threads)
    device = torch.device(settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = CommunicationGroup(RankInfo(settings.rank, settings.size, device), join_store(settings.port))
    return RankWorker(group, getattr(torch, settings.dtype), settings.attention_backend)


def serve(channel: Channel) -> None:
    """The command loop. A command that fails is answered with its error, and the loop goes on."""
    parent = os.getppid()
    worker: RankWorker | None = None
    while True:
        channel.wait(parent)
        message = channel.receive()
        command = Command(message.values.pop("command"))
        if command is Command.STOP:
            return
        try:
            if command is Command.INIT:
                free_bytes = free_memory_bytes(torch.device(message.values["device"]))
                channel.send(Message({"free_bytes": free_bytes}))  # before it waits for the others
                worker = start_worker(RankSettings(**message.values))
                reply = Message()
            else:
                assert worker is not None
                if registration := message.values.pop("registration", None):
                    register_described(registration)
                reply = worker.execute(command, message)
        except Exception as error:
            if worker is not None:
                worker.group.leave()  # whoever waits for this rank must not wait any longer
            reply = Message({"error": asdict(WireError.of(error))})
        channel.send(reply)


@dataclass(frozen=True, slots=True)
class WireError:
    """An exception as text."""

    module: str
    name: str
    message: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> "WireError":
        """Describe an exception."""
        trace = "".join(traceback.format_exception(error))
        return cls(type(error).__module__, type(error).__qualname__, str(error), trace)

    def to_exception(self, rank: int) -> Exception:
        """The exception again, with a note where it came from.

        It has its own type if that is one of ours, of Python's or of a module that is loaded here; else it becomes
        an `EngineError` that names the type.
        """
        from infinilm.errors import EngineError

        kind = getattr(sys.modules.get(self.module), self.name, None)
        error: Exception
        if isinstance(kind, type) and issubclass(kind, Exception):
            error = kind.__new__(kind)
            error.args = (self.message,)
        else:
            error = EngineError(f"{self.name}: {self.message}")
        error.add_note(f"on rank {rank}:\n{self.trace}")
        return error


def main() -> None:
    """Serve the socket whose number is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's business; it stops its ranks itself
    logging.getLogger("infinilm").setLevel(logging.WARNING)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    with suppress(ChannelClosedError):  # which says that the engine's process is gone: nothing is left to do
        serve(channel)
    # Threads of the collectives may still wait for ranks that are gone; they must not keep this process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
