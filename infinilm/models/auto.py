"""Choosing the device, types, formats and other defaults for a checkpoint and a machine."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from infinilm.attention import why_not_native
from infinilm.cache.config import DTYPES, FP8
from infinilm.cache.specs import LatentSpec, StateSpec
from infinilm.checks import check_choice
from infinilm.distributed.shard import WeightShard
from infinilm.errors import CheckpointError, InfinilmError, InvalidTypeError, InvalidValueError
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats import DENSE, WeightFormats, is_native
from infinilm.loading.sources import find_source, resolve
from infinilm.loading.weights import check_shapes
from infinilm.models.config import ModelConfig
from infinilm.models.dense import LlamaConfig
from infinilm.models.native_model import weight_shapes, why_no_token_mixers
from infinilm.models.quantization import check_has_short, choose_formats, has_native_floats, note_dense
from infinilm.models.registry import FAMILIES, create_model
from infinilm.platforms import has_bfloat16, require_device, require_torch, select_indices, split_device
from infinilm.sampling_params import MODEL_DEFAULTS, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from infinilm.loading.checkpoint import Checkpoint
    from infinilm.models.base import InfinilmModel
    from infinilm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

HOPPER = 9
"""The major compute capability of Hopper GPUs."""
ORDERED_BYTES = 256 << 20
"""With at least this many bytes of weights in a layer, products with a fixed order of sums take about as long as
others."""


class AutoConfig:
    """Reads the configuration of any supported checkpoint."""

    def __init__(self) -> None:
        raise NotImplementedError("AutoConfig is not built; call AutoConfig.from_pretrained(path)")

    @staticmethod
    def from_pretrained(path: str | Path | None = None) -> ModelConfig:
        """The configuration of a directory, a .gguf file, an alias or a hub id; None: the embedded model's."""
        return ModelConfig.from_pretrained(resolve(path))


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """The requested device; for None or `auto` the GPU if there is one, else the CPU."""
    import torch

    if device is None or device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not isinstance(device, (str, torch.device)):
        raise InvalidTypeError(f"device={device!r} must be a string or a torch.device")
    kind, index = split_device(device)
    asked = f"device={str(device)!r}"
    device_type = require_device(kind, asked)
    return torch.device("cpu") if device_type == "cpu" else select_indices(device_type, [index or 0], asked)[0]


def choose_dtype(dtype: str | torch.dtype | None, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The requested type; for None or `auto` float32 on a CPU, where it is exact and fast, else the checkpoint's.

    `auto` never chooses float16 if hidden states exceed its range.
    """
    import torch

    if dtype is None or dtype == "auto":
        name = "float32" if device.type == "cpu" else config.dtype or "bfloat16"
        if name == "float16" and config.exceeds_float16:
            name = "bfloat16"
        if name == "bfloat16" and not has_bfloat16(device):
            name = "float32" if config.exceeds_float16 else "float16"
    else:
        name = str(dtype).removeprefix("torch.")
        check_choice("dtype", name, DTYPES)
        if name == "bfloat16" and not has_bfloat16(device):
            raise InvalidValueError(f"dtype='bfloat16': {device} has no bfloat16; use float16, float32 or auto")
    chosen: Any = getattr(torch, name)
    assert isinstance(chosen, torch.dtype)
    return chosen


@dataclass(frozen=True, slots=True)
class ModelChoices:
    """The choices made from settings and checkpoint headers, before any memory is allocated."""

    dtype: torch.dtype
    formats: WeightFormats
    outline: InfinilmModel
    """The outline of rank 0's share."""
    attention_backend: str
    kv_dtype: torch.dtype


def make_choices(
    config: ModelConfig,
    checkpoint: Checkpoint | None,
    device: torch.device,
    num_ranks: int = 1,
    *,
    dtype: str | torch.dtype | None = None,
    quantization: str | None = None,
    activation_bits: int = 16,
    attention_backend: str = "auto",
    kv_cache_dtype: str = "auto",
    deterministic: bool | None = None,
    formats: WeightFormats | None = None,
    keeps_halves: bool = False,
) -> ModelChoices:
    """Choose how a model is stored and computed. The keywords are the engine's settings; a `dtype` of None is `auto`.

    `formats` are the matrices' formats, if already chosen; for `keeps_halves` see `choose_formats`. Without a
    checkpoint weights are random and dense.
    """
    chosen = choose_dtype(dtype, config, device)
    if checkpoint is not None:
        checkpoint.check_values()
        formats = formats or choose_formats(
            checkpoint,
            config.model_type,
            quantization=quantization,
            dtype="auto" if dtype is None else str(dtype).removeprefix("torch."),
            device=device,
            activation_bits=activation_bits,
            keeps_halves=keeps_halves,
        )
        outline = check_fits(checkpoint, config, chosen, num_ranks, formats)
        note_dense(outline.weight_targets(), formats)
    elif quantization not in (None, "none"):
        raise InvalidValueError(
            f"quantization={quantization!r}: matrices are quantised while a checkpoint is read, and a configuration "
            "alone has none; give the path of a checkpoint, or quantization='none'"
        )
    else:
        check_has_short(DENSE, activation_bits, device)
        formats, outline = DENSE, outline_model(config, chosen, num_ranks)
    if kv_cache_dtype == FP8:
        check_fp8_cache("kv_cache_dtype", config, device)
    is_quantized = any(map(is_native, outline.weight_targets().values()))
    if deterministic is None:
        is_usual = num_ranks <= 2 and attention_backend in ("auto", "triton", "native")
        is_usual &= kv_cache_dtype != FP8 or device.type == "cpu"
        is_ordered = is_usual and _orders_cheaply(config, outline, chosen, device)
    else:
        is_ordered = deterministic and (device.type == "cpu" or has_kernels(device))
    prefers_native = is_quantized or (device.type == "cpu" and (is_ordered or bool(formats.halves)))
    attention = select_attention(attention_backend, config, device, prefers_native=prefers_native)
    kv_dtype = select_kv_dtype(kv_cache_dtype, device, chosen, is_half=is_quantized and attention == "native")
    return ModelChoices(chosen, replace(formats, is_ordered=is_ordered), outline, attention, kv_dtype)


def _orders_cheaply(config: ModelConfig, outline: InfinilmModel, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a fixed order of sums is known to give equal bits for a model and to cost little.

    On a CPU the native library computes such sums. On a GPU a small model would have to wait for chains of matrix
    instructions; a large model waits for its weights anyway.
    """
    import torch

    if device.type == "cpu":
        is_known = dtype == torch.float32 and has_native_floats(config.model_type)
        return is_known and select_attention("auto", config, device, prefers_native=True) == "native"
    is_known = (
        has_kernels(device)
        and torch.cuda.get_device_capability(device)[0] == HOPPER
        and dtype in (torch.bfloat16, torch.float16)
        and config.count_experts() is None
        and not any(isinstance(spec, LatentSpec | StateSpec) for spec in config.cache_specs())
    )
    layers = [shard for name, shard in outline.weight_targets().items() if "layers." in name]
    is_dense = all(isinstance(shard, WeightShard) for shard in layers)
    return (
        is_known and is_dense and sum(shard.num_bytes for shard in layers) >= ORDERED_BYTES * config.num_hidden_layers
    )


def select_attention(asked: str, config: ModelConfig, device: torch.device, *, prefers_native: bool) -> str:
    """The requested backend; for `auto` the native library's, if it is preferred and can serve the model.

    It is preferred on a CPU in two cases: if weights are quantised, because it also multiplies them; and if results
    must not depend on how a text is divided into chunks, because torch's results do. It then also computes recurrent
    layers and latent attention.
    """
    if asked not in ("auto", "native") or (asked == "auto" and not prefers_native):
        return asked
    reason = why_not_native(device) or why_no_token_mixers(config, device)
    if reason is not None and asked == "native":
        raise InvalidValueError(
            f"attention_backend='native' can't serve this model: {reason}; use attention_backend='auto'"
        )
    return "native" if reason is None else "auto"


def select_kv_dtype(asked: str, device: torch.device, dtype: torch.dtype, *, is_half: bool) -> torch.dtype:
    """The type of the KV cache: the requested one; for `auto` float16 if `is_half`, else the model's."""
    import torch

    from infinilm.kernels import fp8_cache

    if asked == FP8:
        return fp8_cache.DTYPE
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu" and asked not in ("auto", name):
        raise InvalidValueError(
            f"kv_cache_dtype={asked!r}: on a GPU the cache has the model's dtype, {name}; use 'auto', or "
            "'fp8' for half the memory"
        )
    if asked != "auto":
        name = asked
    elif is_half:
        name = "float16"
    chosen: torch.dtype = getattr(torch, name)
    return chosen


def check_fp8_cache(parameter: str, config: ModelConfig, device: torch.device) -> None:
    """Refuse a model or a device that can't store keys and values as 8-bit floats; `parameter` requested it."""
    from infinilm.kernels import fp8_cache  # needs torch

    reason = fp8_cache.why_not(device)
    if _has_latents(config):
        reason = "latent attention keeps one vector for a token that is key and value, which has no such form here"
    if reason is not None:
        raise InvalidValueError(f"{parameter}='fp8': {reason}; use another type")


def _has_latents(config: ModelConfig) -> bool:
    return any(isinstance(spec, LatentSpec) for spec in config.cache_specs())


def check_fits(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    num_ranks: int = 1,
    formats: WeightFormats = DENSE,
) -> InfinilmModel:
    """Check that a config's model fits the checkpoint's tensors and the number of ranks.

    Returns the outline of a rank's share. This reads only headers and allocates no memory.
    """
    _check_layers(checkpoint, config)
    outline = outline_model(config, dtype, num_ranks, formats=formats)
    shapes = {name: target.full_shape for name, target in outline.weight_targets().items()}
    check_shapes(shapes, checkpoint, is_ignorable=outline.is_ignorable)
    return outline


def check_described(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """As `check_fits`, for a whole model. Needs torch only if the configuration does not fully describe the model."""
    if not FAMILIES[config.model_type].is_native or not isinstance(config, LlamaConfig):
        with require_torch(f"models of model_type={config.model_type!r}"):
            import torch
        check_fits(checkpoint, config, torch.float32)
        return
    _check_layers(checkpoint, config)
    check_shapes(weight_shapes(config), checkpoint, is_ignorable=config.is_ignorable)


def _check_layers(checkpoint: Checkpoint, config: ModelConfig) -> None:
    num_tensors = len(checkpoint.shapes())
    if config.num_hidden_layers > num_tensors:
        raise CheckpointError(
            f"{checkpoint.path}: num_hidden_layers={config.num_hidden_layers}, but there are only "
            f"{num_tensors} tensors; the config and the weights do not belong together"
        )


def outline_model(
    config: ModelConfig,
    dtype: torch.dtype,
    num_ranks: int = 1,
    rank: int = 0,
    formats: WeightFormats = DENSE,
    *,
    num_stages: int = 1,
) -> InfinilmModel:
    """A rank's share of the model without memory: only its weights' names and shapes.

    Each pipeline stage has `num_ranks` ranks; `rank` counts them stage by stage.
    """
    import torch

    from infinilm.distributed.group import CommunicationGroup, RankInfo

    meta = torch.device("meta")
    group = CommunicationGroup(RankInfo(rank % num_ranks, num_ranks, meta))
    return create_model(
        config,
        max_len=1,
        dtype=dtype,
        device=meta,
        group=group,
        formats=formats,
        num_stages=num_stages,
        stage=rank // num_ranks,
    )


def find_eos_token_ids(checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """All token ids that end an answer: those of the generation config and the model's config, else the tokenizer's."""
    found: dict[int, None] = {}
    for ids in (checkpoint.generation_config.get("eos_token_id"), config.eos_token_id):
        for token_id in ids if isinstance(ids, list) else [ids]:
            if isinstance(token_id, int) and 0 <= token_id < config.vocab_size:
                found[token_id] = None
    last = None if tokenizer is None else tokenizer.eos_token_id
    if not found and last is not None and last < config.vocab_size:  # a tokenizer may know more tokens than the model
        found[last] = None
    return tuple(found)


def find_default_sampling(checkpoint: Checkpoint) -> SamplingParams:
    """The defaults of sampling parameters: the checkpoint's, else those from the model's card.

    `do_sample: false` in a generation config means greedy. Invalid values are ignored with a warning.
    """
    stored = checkpoint.generation_config
    given = {name: stored[name] for name in MODEL_DEFAULTS if stored.get(name) is not None}
    if stored.get("do_sample") is False:
        given["temperature"] = 0.0
    if not given and (source := find_source(checkpoint.path)):
        given = dict(source.sampling)
    wrong = []
    for name, value in tuple(given.items()):
        try:
            SamplingParams.from_kwargs(**{name: value})
        except InfinilmError as error:
            wrong.append(str(error)[:200])
            del given[name]
    if wrong:
        logger.warning("%s: sampling defaults are ignored: %s", checkpoint.path, "; ".join(wrong))
    return SamplingParams(**given)
