"""Commands to ranks in other processes, and their arguments as messages: JSON and raw arrays, never code."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinilm.attention import HostBatch
from infinilm.distributed.channel import Message
from infinilm.errors import CheckpointError
from infinilm.executor.commands import Command
from infinilm.executor.executor import CacheShape, MeasuredWorkspace, RunnerSettings
from infinilm.executor.rank_worker import ForwardInput, RankWorker
from infinilm.executor.step_io import BlockUpdates, DecodeRows, IntArray, RowChunk, StepInput
from infinilm.layers.formats import WeightFormats
from infinilm.models import ModelConfig
from infinilm.models.registry import describe_import, describe_registration, import_described, register_described


def write_call(command: Command, arguments: Sequence[Any], ranks: Sequence[int]) -> list[Message]:
    """The arguments of a worker's method as messages to other `ranks`."""
    match command:
        case Command.LOAD_SHARDS:
            return [Message(tensors=arguments[0][rank]) for rank in ranks]
        case Command.LOAD:
            message = _write_load(*arguments) if ranks else Message()
        case Command.EXECUTE:
            message = write_step(*arguments)
        case Command.FORWARD:
            message = write_forward(*arguments)
        case Command.RESET_CACHE if arguments[0] is not None and ranks:
            message = Message(_write_shape(arguments[0]))
        case _:
            message = Message(asdict(arguments[0]) if arguments and arguments[0] is not None else {})
    return [message] * len(ranks)


def handle_call(worker: RankWorker, command: Command, message: Message) -> Message:
    """Carry out a command on a rank other than the driver."""
    values = message.values
    match command:
        case Command.LOAD:
            source = values["source"]
            if not isinstance(source, int) and not Path(source).exists():
                raise CheckpointError(
                    f"{worker.group.title} has no {source}; every node reads its own part of the weights, so put "
                    "the model there too, or use a directory that all nodes share"
                )
            if registration := values["registration"]:
                register_described(registration)
            worker.load(
                ModelConfig.from_dict(values["config"]),
                values["max_len"],
                source if isinstance(source, int) else Path(source),
                WeightFormats(
                    values["formats"],
                    halves=values["halves"],
                    is_ordered=values["is_ordered"],
                    is_native=values["is_native"],
                    activation_bits=values["activation_bits"],
                ),
            )
        case Command.LOAD_SHARDS:
            worker.load_shards({worker.rank: message.tensors})
        case Command.STATE_DICT:
            return Message(tensors=worker.state_dict())
        case Command.RESET_CACHE:
            worker.reset_cache(_read_shape(values))
        case Command.CHECK_LAYERS:
            return Message({"failing": worker.check_layers()})
        case Command.MEASURE_WORKSPACE:
            return Message(asdict(worker.measure_workspace(RunnerSettings(**values))))
        case Command.START_ROWS:
            worker.start_rows(RunnerSettings(**values))
        case Command.EXECUTE:
            worker.execute(read_step(message), values["hook_patterns"])
        case Command.FORWARD:
            worker.forward(read_forward(message))
        case _:
            raise ValueError(f"rank {worker.rank} got the command {command!r}, which it does not know")
    return Message()


def read_reply(command: Command, reply: Message) -> Any:
    """The result of a worker's method, from its message."""
    match command:
        case Command.STATE_DICT:
            return dict(reply.tensors)
        case Command.CHECK_LAYERS:
            return reply.values["failing"]
        case Command.MEASURE_WORKSPACE:
            return MeasuredWorkspace(**reply.values)
    return None


def _write_load(config: ModelConfig, max_len: int, source: Path | int, formats: WeightFormats) -> Message:
    return Message(
        {
            "config": config.to_dict(),
            "max_len": max_len,
            "source": source if isinstance(source, int) else str(source.absolute()),
            "formats": dict(formats.by_name),
            "halves": dict(formats.halves),
            "is_ordered": formats.is_ordered,
            "is_native": formats.is_native,
            "activation_bits": formats.activation_bits,
            "registration": describe_registration(config.model_type),
        }
    )


def _message(values: dict[str, Any], arrays: dict[str, IntArray]) -> Message:
    return Message(values, {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()})


def _arrays(message: Message) -> dict[str, IntArray]:
    return {name: tensor.numpy() for name, tensor in message.tensors.items()}


def write_step(step: StepInput, hook_patterns: Sequence[str]) -> Message:
    """A step for ranks other than the driver. They do not sample, so `starts` is left out."""
    chunks = step.chunks
    fields = [
        (chunk.row, chunk.start, len(chunk.token_ids), chunk.samples, len(chunk.prompt_targets)) for chunk in chunks
    ]
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    arrays = {
        "block_groups": step.blocks.groups,
        "block_rows": step.blocks.rows,
        "block_places": step.blocks.places,
        "blocks": step.blocks.blocks,
        "rows": step.decoding.rows,
        "starts": step.decoding.starts,
        "token_ids": step.decoding.token_ids,
        "chunks": np.array(fields, dtype=np.int64).reshape(-1, 5),
        "chunk_token_ids": np.array(token_ids, dtype=np.int64),
    }
    values = {
        "ended_rows": list(step.ended_rows),
        "samples_on_host": step.samples_on_host,
        "hook_patterns": list(hook_patterns),
    }
    return _message(values, arrays)


def read_step(message: Message) -> StepInput:
    """The step that `write_step` wrote."""
    arrays = _arrays(message)
    token_ids = arrays["chunk_token_ids"].tolist()
    chunks: list[RowChunk] = []
    first = 0
    for row, start, num_tokens, samples, num_targets in arrays["chunks"].tolist():
        own = token_ids[first : first + num_tokens]
        chunks.append(RowChunk(row, start, own, bool(samples), prompt_targets=[0] * num_targets))
        first += num_tokens
    return StepInput(
        message.values["ended_rows"],
        (),
        BlockUpdates(*(arrays[name] for name in ("block_groups", "block_rows", "block_places", "blocks"))),
        DecodeRows(arrays["rows"], arrays["starts"], arrays["token_ids"]),
        chunks,
        samples_on_host=message.values["samples_on_host"],
    )


def write_forward(given: ForwardInput) -> Message:
    arrays = {name: getattr(given.batch, name) for name in HostBatch.__dataclass_fields__}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    shape = _write_shape(given.shape) if given.shape else None
    values = {"shape": shape, "hook_patterns": list(given.hook_patterns)}
    return _message(values, {**arrays, "logit_rows": given.logit_rows})


def read_forward(message: Message) -> ForwardInput:
    """The pass that `write_forward` wrote."""
    arrays, shape = _arrays(message), message.values["shape"]
    logit_rows = arrays.pop("logit_rows")
    return ForwardInput(HostBatch(**arrays), logit_rows, _read_shape(shape), message.values["hook_patterns"])


def _write_shape(shape: CacheShape) -> dict[str, Any]:
    kind = shape.cache_class and describe_import("cache class", shape.cache_class)
    return {**asdict(replace(shape, cache_class=None)), "cache_class": kind}


def _read_shape(values: dict[str, Any] | None) -> CacheShape | None:
    if not values:
        return None
    kind = values["cache_class"]
    return CacheShape(**{**values, "cache_class": kind and import_described(kind)})
