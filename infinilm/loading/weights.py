"""Loads a model's weights from a checkpoint; names and shapes must match exactly."""

import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from infinilm.distributed.shard import ArrayShard, Shard, WeightShard
from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import Checkpoint
from infinilm.platforms import count_cores

_MAX_LISTED = 20
_MAX_WORKERS = 8


def is_rotary_buffer(name: str) -> bool:
    """Whether a tensor only repeats settings of the config, as in some older checkpoints."""
    return name.endswith(".rotary_emb.inv_freq")


def check_shapes(
    expected: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    *,
    is_ignorable: Callable[[str], bool] = is_rotary_buffer,
) -> None:
    """Raise one error that lists every missing, unexpected and misshapen tensor, from the headers alone.

    Unexpected tensors are ignored if `is_ignorable(name)`, or if they are biases of only zeros, which GPTQ tools add.
    """
    found = checkpoint.shapes()
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found]
    unexpected = [
        f"{name} {list(shape)}"
        for name, shape in found.items()
        if name not in expected and not is_ignorable(name) and not _is_zero_bias(name, checkpoint)
    ]
    misshapen = [
        f"{name}: {list(found[name])} in the checkpoint, {list(shape)} in the model"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    lines: list[str] = []
    for kind, tensors in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen)):
        if tensors:
            lines += [f"{len(tensors)} {kind}:", *(f"  {tensor}" for tensor in tensors[:_MAX_LISTED])]
        if len(tensors) > _MAX_LISTED:
            lines.append(f"  and {len(tensors) - _MAX_LISTED} more")
    if lines:
        raise CheckpointError(
            f"{checkpoint.path}: the tensors do not fit the model its config describes; " + "\n".join(lines)
        )


def _is_zero_bias(name: str, checkpoint: Checkpoint) -> bool:
    return name.endswith(".bias") and not checkpoint.read_floats(name).any()


def load_weights(
    targets: Mapping[str, Shard | ArrayShard],
    checkpoint: Checkpoint,
    *,
    is_ignorable: Callable[[str], bool] = is_rotary_buffer,
    show_progress: bool = True,
) -> None:
    """Fill every shard of `targets` (by Hugging Face name) in place, converting type and device, or quantising.

    Names and full shapes must match exactly, see `check_shapes`. They are checked before anything is read. Only the
    shards are read.
    """
    check_shapes({name: target.full_shape for name, target in targets.items()}, checkpoint, is_ignorable=is_ignorable)

    has_tensors = any(isinstance(target, WeightShard) for target in targets.values())

    def read(name: str) -> int:
        with _inference_mode() if has_tensors else nullcontext():  # per thread; weights may have been created in it
            targets[name].load(name, checkpoint)
        return targets[name].num_bytes

    names = [name for name in checkpoint.shapes() if name in targets]
    num_bytes = sum(target.num_bytes for target in targets.values())
    with (
        _tensor_workers() if has_tensors else _array_workers() as workers,
        _progress(num_bytes, is_shown=show_progress) as update,
    ):
        for num_bytes_read in workers.map(read, names):
            update(num_bytes_read)


@contextmanager
def _progress(num_bytes: int, *, is_shown: bool) -> Iterator[Callable[[int], Any]]:
    if not is_shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="Loading weights", leave=False) as bar:
        yield bar.update


def _inference_mode() -> AbstractContextManager[Any]:
    import torch

    return torch.inference_mode()


def _array_workers() -> ThreadPoolExecutor:
    """Threads for NumPy and the native library, which use one core each."""
    return ThreadPoolExecutor(min(count_cores(), _MAX_WORKERS), "load-weights")


@contextmanager
def _tensor_workers() -> Iterator[ThreadPoolExecutor]:
    """Threads that each run torch on a single core. There are as many as torch would use for one operation.

    Decoding consists of thousands of short operations. One tensor per thread is faster than all threads on each
    operation, even if other processes keep the cores busy.
    """
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # new threads start with this number
    try:
        with ThreadPoolExecutor(min(num_threads, _MAX_WORKERS), "load-weights") as workers:
            yield workers
    finally:
        torch.set_num_threads(num_threads)
