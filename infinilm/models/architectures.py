"""The architectures that the decoder serves, and how their configurations differ from Llama's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.checks import check_integer
from infinilm.errors import CheckpointError

MAX_LAYERS = 10_000
"""More than any model has: a config that says so is damaged."""
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What sets an architecture apart."""

    class_name: str
    """What `architectures` in a config.json calls it."""
    defaults: Mapping[str, Any]
    """The settings that make it what it is, and Hugging Face's defaults where they differ from Llama's."""
    ignored: frozenset[str] = frozenset()
    """Settings of Llama that Hugging Face's class does not read: a config.json may hold them all the same."""


_LLAMA: Mapping[str, Any] = {"use_sliding_window": False, "max_window_layers": 0}
_MISTRAL: Mapping[str, Any] = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "sliding_window": 4096,
}
_QWEN: Mapping[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "sliding_window": 4096,
}

_BIASES = frozenset({"attention_bias", "mlp_bias"})

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", _LLAMA),
    "mistral": Architecture("MistralForCausalLM", _MISTRAL, ignored=_BIASES),
    "qwen2": Architecture("Qwen2ForCausalLM", {**_QWEN, "qkv_bias": True}, ignored=_BIASES),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", {**_QWEN, "qk_norm": True, "head_dim": 128}, ignored=frozenset({"mlp_bias"})
    ),
}
"""By `model_type`. `register_model` adds to them."""


def find_model_type(config: Mapping[str, Any]) -> str:
    """Which of `ARCHITECTURES` a config.json describes, by its `model_type` or else its `architectures`."""
    by_class = {architecture.class_name: name for name, architecture in ARCHITECTURES.items()}
    classes = config.get("architectures") or []
    if not isinstance(classes, list):
        raise CheckpointError(f"architectures={classes!r} must be a list of names")
    model_type = config.get("model_type") or next(
        (by_class[str(name)] for name in classes if str(name) in by_class), ""
    )
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None or (classes and architecture.class_name not in classes):
        raise CheckpointError(
            f"model_type={config.get('model_type')!r}, architectures={classes!r} is not supported; "
            f"supported are {', '.join(f'{name} ({kind})' for kind, name in by_class.items())}"
        )
    return str(model_type)


def read_windows(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a config means with its window: `sliding_window` and `layer_types`.

    The window counts only with `use_sliding_window`, and then from layer `max_window_layers` on, unless the
    type of each layer is given.
    """
    window = settings.get("sliding_window") if settings["use_sliding_window"] else None
    if window is None:
        return {"sliding_window": None, "layer_types": None}
    first, count = settings["max_window_layers"], settings["num_hidden_layers"]
    check_integer("max_window_layers", first, low=0)
    check_integer("num_hidden_layers", count, low=1, high=MAX_LAYERS)
    types = [SLIDING_ATTENTION if layer >= first else FULL_ATTENTION for layer in range(count)]
    return {"sliding_window": window, "layer_types": settings.get("layer_types") or types}
