"""Which code runs which architecture."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.errors import InvalidValueError
from infinilm.layers.formats import DENSE, WeightFormats
from infinilm.layers.linear import check_heads
from infinilm.models.architectures import ARCHITECTURES, Architecture
from infinilm.models.base import InfinilmModel
from infinilm.models.config import LlamaConfig
from infinilm.models.decoder import CausalLM
from infinilm.models.rope_parameters import ROPE_SETTINGS

ModelBuilder = Callable[..., InfinilmModel]
"""Called as `builder(config, max_len=…, dtype=…, device=…, group=…)`; gives a model, or the share of it that the
group's rank has, with empty weights. One that can keep matrices quantised has a parameter `formats` for it."""

_BUILDERS: dict[str, ModelBuilder] = dict.fromkeys(ARCHITECTURES, CausalLM)
_BUILT_IN = frozenset(ARCHITECTURES)
"""What every process knows by itself."""


def register_model(
    model_type: str,
    class_name: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    builder: ModelBuilder = CausalLM,
) -> None:
    """Add an architecture, so that checkpoints of it can be loaded.

    `model_type` and `class_name` are what its config.json says in `model_type` and `architectures`; `defaults` are
    the settings of `LlamaConfig` in which it differs from Llama (`{"qk_norm": True}`, say). The decoder serves it
    unless a `builder` is given.
    """
    if model_type in ARCHITECTURES:
        raise InvalidValueError(f"model_type={model_type!r} is registered already; choose another name")
    windows = {"use_sliding_window": False, "max_window_layers": 0}
    known = [*(item.name for item in fields(LlamaConfig)), *ROPE_SETTINGS, *windows]
    if unknown := (defaults or {}).keys() - set(known):
        raise InvalidValueError(
            f"defaults of model_type={model_type!r}: LlamaConfig has no setting {', '.join(sorted(unknown))}; "
            f"it has {', '.join(known)}"
        )
    ARCHITECTURES[model_type] = Architecture(class_name, {**windows, **(defaults or {})})
    _BUILDERS[model_type] = builder


def create_model(
    config: LlamaConfig,
    *,
    max_len: int | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
    group: CommunicationGroup = SINGLE,
    formats: WeightFormats = DENSE,
) -> InfinilmModel:
    """Build the model that a configuration describes, with empty weights, for texts of up to `max_len` tokens.

    `formats`, unless empty, are for a model that `keeps_quantized`.
    """
    config.validate()
    check_heads(config.num_attention_heads, config.num_key_value_heads, group.size)
    kept: dict[str, Any] = {"formats": formats} if formats.by_name else {}
    return _BUILDERS[config.model_type](config, max_len=max_len, dtype=dtype, device=device, group=group, **kept)


def keeps_quantized(model_type: str) -> bool:
    """Whether models of this type can keep matrices quantised."""
    return "formats" in signature(_BUILDERS[model_type]).parameters


def describe_registration(model_type: str) -> dict[str, Any] | None:
    """How another process can register an architecture that was registered in this one; None for a built-in one."""
    if model_type in _BUILT_IN:
        return None
    builder = _BUILDERS[model_type]
    module, name = getattr(builder, "__module__", ""), getattr(builder, "__qualname__", "")
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not builder:
        raise InvalidValueError(
            f"the builder of model_type={model_type!r}, {module}.{name}, can't be imported by other processes, as "
            "tensor parallelism needs; define it at the top level of a module"
        )
    architecture = ARCHITECTURES[model_type]
    return {
        "model_type": model_type,
        "class_name": architecture.class_name,
        "defaults": dict(architecture.defaults),
        "module": module,
        "builder": name,
    }


def register_described(registration: Mapping[str, Any]) -> None:
    """Register what `describe_registration` describes, unless importing its module has done so already."""
    module = import_module(registration["module"])
    if registration["model_type"] not in ARCHITECTURES:
        register_model(
            registration["model_type"],
            registration["class_name"],
            defaults=registration["defaults"],
            builder=getattr(module, registration["builder"]),
        )
