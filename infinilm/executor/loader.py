"""Makes a model ready to run: finds it, loads it and divides the memory."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from infinilm.config import Config
from infinilm.distributed.config import DistConfig
from infinilm.errors import InvalidValueError
from infinilm.executor.executor import CacheShape, Executor, RunnerSettings
from infinilm.executor.fingerprint import computing_settings, make_fingerprint
from infinilm.executor.guarantee import Guarantee, find_guarantee
from infinilm.executor.local import LocalExecutor
from infinilm.executor.memory import (
    MemoryLedger,
    describe_oom,
    give_back,
    is_out_of_memory,
    plan_memory,
    plan_stages,
)
from infinilm.executor.native_worker import NativeWorker
from infinilm.executor.workspace import estimate_workspace, uses_graphs
from infinilm.kernels import native
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats import WeightFormats
from infinilm.loading.checkpoint import Checkpoint, open_checkpoint
from infinilm.loading.sources import resolve
from infinilm.models import ModelConfig
from infinilm.models.auto import (
    ModelChoices,
    check_described,
    find_default_sampling,
    find_eos_token_ids,
    make_choices,
    outline_model,
)
from infinilm.models.dense import LlamaConfig
from infinilm.models.native_model import NativeModel, why_not_alone
from infinilm.models.quantization import choose_formats
from infinilm.models.stages import Stage
from infinilm.platforms import HOST, is_nvidia, may_have_gpu, require_device, require_torch, select_indices, wake_driver
from infinilm.sampling_params import SamplingParams
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from infinilm.executor.memory import Device, DType
    from infinilm.models.base import StagedModel

logger = logging.getLogger(__name__)

MODEL_SETTINGS = ("dtype", "quantization", "activation_bits", "attention_backend", "kv_cache_dtype", "deterministic")
"""The settings that decide how the model is stored and computed."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model that the engine runs, and what was measured and decided while loading it."""

    executor: Executor
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    memory: MemoryLedger
    """The memory of the fullest pipeline stage."""
    default_sampling_params: SamplingParams = SamplingParams()  # noqa: RUF009 (it is frozen)
    more_memory: tuple[MemoryLedger, ...] = ()
    """The memory of the other pipeline stages."""
    guarantee: Guarantee = Guarantee()  # noqa: RUF009 (it is frozen)
    fingerprint: str = ""
    """`system_fingerprint` of replies."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Loading times by cause."""


def prepare_for_gpu() -> None:
    """If there may be a GPU, import what a model on it needs. Meanwhile the GPU's driver and Triton initialise.

    For a process that does not know its settings yet.
    """
    Thread(target=wake_driver, daemon=True).start()
    if not may_have_gpu():
        return
    import infinilm.executor.rank_worker  # noqa: F401 - with torch

    if find_spec("triton") is not None:
        from infinilm.kernels.precompile import preparing_compiler

        preparing_compiler()


class Laps:
    """Measures times by cause, from its construction on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def note(self, cause: str) -> None:
        """Record the time since the last note under `cause`."""
        now = perf_counter()
        self.seconds[cause], self._last = now - self._last, now


def load_model(config: Config) -> LoadedModel:
    """Load the checkpoint that the settings name."""
    start_time = perf_counter()
    if config.device != "auto":
        require_device(config.device, f"device={config.device!r}")  # before a model is downloaded
    path = resolve(config.model)
    checkpoint = open_checkpoint(path)
    try:
        loaded = _load(checkpoint, config)
    finally:
        checkpoint.close()
    info = loaded.executor.info
    logger.info(
        "%s: ready on %s in %.1f s, for up to %s tokens of prompt and answer",
        path.name,
        info.device if info.num_ranks == 1 else f"{info.num_ranks} x {info.device.partition(':')[0]}",
        perf_counter() - start_time,
        f"{loaded.max_model_len:,}",
    )
    logger.debug("a %s model in %s, attention by %s", loaded.model_config.model_type, info.dtype, info.attention)
    logger.debug("start: %s", ", ".join(f"{cause} {time:.2f} s" for cause, time in loaded.seconds.items()))
    for memory in (loaded.memory, *loaded.more_memory):
        logger.debug("%s", memory)
    return loaded


@dataclass(frozen=True, slots=True)
class _Run:
    """How a model will run, decided from settings and headers."""

    device: "Device"
    dtype: "DType"
    kv_dtype: "DType"
    formats: WeightFormats
    weight_bytes: Mapping[Stage, int]
    """The pipeline stages, and the bytes of weights on a rank of each."""
    start: Callable[[], Executor]
    uses_torch: bool = True


def _choose_run(checkpoint: Checkpoint, config: Config, model_config: ModelConfig, distributed: DistConfig) -> _Run:
    """Choose the native library alone if it can run the model, else torch."""
    reason, formats = _why_torch(config, distributed), None
    if reason is None:
        formats = choose_formats(
            checkpoint,
            model_config.model_type,
            quantization=config.quantization,
            dtype=config.dtype,
            device=HOST,
            activation_bits=config.activation_bits,
            keeps_halves=True,
        )
        reason = why_not_alone(model_config, formats)
    if reason is not None:
        with require_torch(reason):
            import torch  # noqa: F401 - whether there is one
        return _with_torch(checkpoint, config, model_config, distributed, formats)
    assert isinstance(model_config, LlamaConfig)
    assert formats is not None
    checkpoint.check_values()
    check_described(checkpoint, model_config)
    outline = NativeModel(model_config, formats, 1, is_outline=True)
    kv_dtype = np.dtype("float16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)
    stages = {Stage.whole(model_config.num_hidden_layers): outline.num_bytes()}
    start = partial(LocalExecutor, NativeWorker())
    return _Run(HOST, np.dtype(np.float32), kv_dtype, formats, stages, start, uses_torch=False)


def _why_torch(config: Config, distributed: DistConfig) -> str | None:
    """The setting that requires torch, or None."""
    if config.device not in ("auto", "cpu") or (config.device == "auto" and may_have_gpu()):
        return f"device={config.device!r}"
    if (count := distributed.tp_size * distributed.pp_size) > 1:
        return f"a model on {count} ranks"
    if config.executor not in ("auto", "local"):
        return f"executor={config.executor!r}"
    if config.attention_backend not in ("auto", "native"):
        return f"attention_backend={config.attention_backend!r}"
    if config.kv_cache_dtype not in ("auto", "float16", "float32"):
        return f"kv_cache_dtype={config.kv_cache_dtype!r}"
    return "a model without the native library" if native.load() is None else None


def _with_torch(
    checkpoint: Checkpoint,
    config: Config,
    model_config: ModelConfig,
    distributed: DistConfig,
    formats: WeightFormats | None,
) -> _Run:
    tp_size, num_stages = distributed.tp_size, distributed.pp_size
    devices = select_devices(config.device, distributed, executor=config.executor)
    settings: dict[str, Any] = {name: getattr(config, name) for name in MODEL_SETTINGS}
    settings |= {"formats": formats, "keeps_halves": True}
    choices = make_choices(model_config, checkpoint, devices[0], tp_size, **settings)
    return _Run(
        devices[0],
        choices.dtype,
        choices.kv_dtype,
        choices.formats,
        _weigh_stages(model_config, choices, tp_size, num_stages),
        partial(start_executor, config.executor, devices, choices.dtype, choices.attention_backend, num_stages),
    )


def _load(checkpoint: Checkpoint, config: Config) -> LoadedModel:
    laps = Laps()
    model_config = ModelConfig.from_dict(checkpoint.config)
    tokenizer = checkpoint.tokenizer()
    distributed = config.distributed or DistConfig(config.tensor_parallel_size, pp_size=config.pipeline_parallel_size)
    longest = select_max_model_len(config, model_config)
    run = _choose_run(checkpoint, config, model_config, distributed)
    laps.note("headers and tokenizer")
    executor: Executor | None = None
    memory: MemoryLedger | None = None
    try:
        executor = run.start()
        laps.note("device")
        lengths = {"max_model_len": longest, "tp_size": distributed.tp_size}
        workspace = estimate_workspace(config, model_config, run.dtype, run.device, **lengths)
        sizes = {"kv_dtype": run.kv_dtype, "free_bytes": executor.free_bytes, "tp_size": distributed.tp_size}
        plan = partial(_plan, config, model_config, run.weight_bytes, device=run.device, **sizes)
        memory, *more_memory = plan(workspace=workspace, max_model_len=longest)
        if has_kernels(cast(Any, run.device)):
            from infinilm.kernels.precompile import preparing_compiler  # which needs Triton

            preparing_compiler()  # while weights are read
        executor.load(model_config, memory.max_model_len, checkpoint.path, run.formats)
        laps.note("weights")
        kv_dtype = str(run.kv_dtype).removeprefix("torch.")
        settings = _runner_settings(config, memory, run.device, kv_dtype)
        if is_nvidia(cast(Any, run.device)):
            measured = workspace.measured(executor.measure_workspace(settings))
            memory, *more_memory = plan(workspace=measured, max_model_len=memory.max_model_len)
        laps.note("kernels and first steps")
        executor.reset_cache(CacheShape(memory.group_blocks, memory.block_size, kv_dtype))
        laps.note("KV cache")
        executor.start_rows(settings)
        laps.note("graphs")
        is_ordered = run.formats.is_ordered or bool(config.deterministic)
        guarantee = find_guarantee(executor, is_ordered=is_ordered)
        laps.note("self-check")
    except BaseException as error:
        if executor is not None:
            executor.shutdown()
        if not is_out_of_memory(error):
            raise
        give_back(error)
        raise InvalidValueError(describe_oom("loading the model", error, memory)) from error
    how = computing_settings(executor.info, kv_dtype, run.formats, model_config, memory.max_model_len)
    return LoadedModel(
        executor,
        model_config,
        tokenizer,
        find_eos_token_ids(checkpoint, model_config, tokenizer),
        memory.max_model_len,
        memory,
        find_default_sampling(checkpoint),
        tuple(more_memory),
        guarantee,
        make_fingerprint(checkpoint.path, guarantee, how, uses_torch=run.uses_torch),
        laps.seconds,
    )


def _runner_settings(config: Config, memory: MemoryLedger, device: "Device", kv_dtype: str) -> RunnerSettings:
    return RunnerSettings(
        max_num_rows=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_model_len=memory.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=memory.block_size,
        use_graphs=uses_graphs(config, device),
        kv_dtype=kv_dtype,
    )


def _plan(
    config: Config,
    model_config: ModelConfig,
    weight_bytes: Mapping[Stage, int],
    **settings: Any,
) -> list[MemoryLedger]:
    """The memory of a rank of each pipeline stage, the fullest first; for `settings` see `plan_memory`."""
    plans = [
        plan_memory(config, model_config, weight_bytes=num_bytes, stage=stage, **settings)
        for stage, num_bytes in weight_bytes.items()
    ]
    return plan_stages(plans)


def _weigh_stages(model_config: ModelConfig, choices: ModelChoices, tp_size: int, num_stages: int) -> dict[Stage, int]:
    """The pipeline stages, and the bytes of weights on a rank of each."""
    if num_stages == 1:
        return {Stage.whole(model_config.num_hidden_layers): choices.outline.num_bytes()}
    parts = [
        outline_model(model_config, choices.dtype, tp_size, rank, choices.formats, num_stages=num_stages)
        for rank in range(0, num_stages * tp_size, tp_size)
    ]
    return {cast("StagedModel", part).stage: part.num_bytes() for part in parts}


def start_executor(
    kind: str,
    devices: "Sequence[torch.device]",
    dtype: "torch.dtype",
    attention_backend: str = "auto",
    num_stages: int = 1,
) -> Executor:
    """Start a rank on each device, those of the first pipeline stage first; `kind` is `Config.executor`."""
    import torch

    from infinilm.distributed.group import CommunicationGroup, RankInfo
    from infinilm.executor.processes import ProcessExecutor
    from infinilm.executor.rank_worker import RankWorker
    from infinilm.models.cpu import avoid_false_amx

    if devices[0].type == "cpu" and dtype != torch.float32:
        avoid_false_amx()
    if kind == "local" and len(devices) > 1:
        raise InvalidValueError(f"executor='local' runs one rank, not {len(devices)}; use executor='processes'")
    if kind == "local" or (kind == "auto" and len(devices) == 1):
        return LocalExecutor(RankWorker(CommunicationGroup(RankInfo(0, 1, devices[0])), dtype, attention_backend))
    if kind.startswith("ray"):
        from infinilm.executor.ray_executor import RayExecutor

        return RayExecutor(kind, devices, dtype, attention_backend, num_stages)
    return ProcessExecutor(devices, dtype, attention_backend, num_stages)


def select_devices(
    kind: str, distributed: DistConfig, parameter: str = "device", *, executor: str = "auto"
) -> "list[torch.device]":
    """The device of each rank, of the given kind or, for `auto`, the best there is. Ranks on a CPU share it.

    `parameter` is the name of `kind` in errors. On Ray the nodes have the devices, and Ray chooses among them.
    """
    import torch

    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device_type = require_device(kind, f"{parameter}={kind!r}")
    ids = distributed.tp_device_ids
    if executor.startswith("ray"):
        if ids != list(range(len(ids))):
            raise InvalidValueError(f"tp_device_ids={ids} and executor={executor!r} disagree: Ray chooses the devices")
        if device_type not in ("cpu", "cuda"):
            raise InvalidValueError(f"{parameter}={kind!r} and executor={executor!r} disagree: use cpu or cuda on Ray")
        return [torch.device(device_type)] * len(ids)
    if device_type == "cpu":
        return [torch.device("cpu")] * len(ids)
    return select_indices(device_type, ids, f"tp_device_ids={ids}")


def select_max_model_len(config: Config, model_config: ModelConfig) -> int:
    """The length asked for, limited to what the checkpoint was made for. Logs a warning if the limit applies."""
    longest = model_config.max_context_len()
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        logger.warning(
            "max_model_len=%d is more than the checkpoint's %d positions; %d is used",
            *(config.max_model_len, longest, longest),
        )
    return min(config.max_model_len, longest)
