"""The process of one rank other than the driver.

It executes commands until it is told to stop or the engine's process has ended.
"""

import logging
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from infinilm.distributed.channel import Channel, Message
from infinilm.distributed.group import join_store, make_groups
from infinilm.errors import EngineError
from infinilm.executor.commands import Command
from infinilm.executor.memory import free_memory_bytes
from infinilm.executor.rank_worker import RankWorker
from infinilm.executor.wire import handle_call
from infinilm.framing import ChannelClosedError
from infinilm.platforms import split_device
from infinilm.processes import exit_with_parent, parent_socket


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a rank needs to know to start."""

    rank: int
    title: str
    """Its name in errors."""
    tp_size: int
    num_stages: int
    device: str
    dtype: str
    attention_backend: str
    store_host: str
    """The rendezvous of the ranks."""
    store_port: int
    host: str
    """The address at which other ranks reach this one."""
    num_threads: int


def serve(channel: Channel) -> None:
    """The command loop. If a command fails, the reply is its error, and the loop goes on."""
    rank: _Rank | None = None
    while True:
        message = channel.receive()
        command = Command(message.values.pop("command"))
        if command is Command.STOP:
            return
        try:
            if command is Command.INIT:
                rank = _Rank(RankSettings(**message.values))
                reply = Message({"free_bytes": rank.free_bytes})
            else:
                assert rank is not None
                reply = rank.execute(command, message)
        except BaseException as error:
            if rank is not None:
                rank.worker.leave()  # unblocks ranks stuck in a collective
            reply = Message({"error": asdict(WireError.of(error))})
        channel.send(reply)


class _Rank:
    """A worker and its set-up."""

    def __init__(self, settings: RankSettings) -> None:
        split_device(settings.device)  # imports the plug-in that torch needs for the device
        device = torch.device(settings.device)
        if device.type != "cpu":
            torch.get_device_module(device).set_device(device)
        self.free_bytes = free_memory_bytes(device)
        store = join_store(settings.store_port, settings.store_host)
        group, stages = make_groups(
            settings.rank,
            settings.tp_size,
            settings.num_stages,
            device,
            store,
            host=settings.host,
            title=settings.title,
        )
        dtype: torch.dtype = getattr(torch, settings.dtype)
        self.worker = RankWorker(group, dtype, settings.attention_backend, settings.num_threads, stages)

    def execute(self, command: Command, message: Message) -> Message:
        if command is Command.JOIN:
            self.worker.join(message.values["rendezvous"])
            return Message()
        with self.worker.computing():
            return handle_call(self.worker, command, message)


@dataclass(frozen=True, slots=True)
class WireError:
    """An exception as text."""

    module: str
    name: str
    arguments: list[Any]
    """The arguments it was made with that can be sent."""
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> "WireError":
        """Describe an exception."""
        kind = type(error)
        arguments = [value for value in error.args if value is None or isinstance(value, str | int | float)]
        trace = "".join(traceback.format_exception(error))
        return cls(kind.__module__, kind.__qualname__, arguments, str(error), trace)

    def to_exception(self, rank: str) -> Exception:
        """Make the exception again, with a note that says where it came from.

        It has its own type if this process knows the type and the message comes out the same. Otherwise it is an
        `EngineError` that names the type.
        """
        error = self._remake() or EngineError(f"{self.name}: {self.message}")
        error.add_note(f"on {rank}:\n{self.trace}")
        return error

    def _remake(self) -> Exception | None:
        kind = getattr(sys.modules.get(self.module), self.name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            for arguments in (self.arguments, [self.message]):
                with suppress(Exception):  # a type may need other arguments than `args`
                    error = kind(*arguments)
                    if str(error) == self.message:
                        return error
        return None


def main() -> None:
    """Serve the process that started this one."""
    exit_with_parent()
    logging.getLogger("infinilm").setLevel(logging.WARNING)
    exit_code = 0
    try:
        serve(Channel(parent_socket()))
    except ChannelClosedError:  # the engine's process has ended
        pass
    except BaseException:
        traceback.print_exc()
        exit_code = 1
    # Threads of the collectives may still wait for ranks that are gone; they must not keep this process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
