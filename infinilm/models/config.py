"""What a checkpoint says of its model: one description for all architectures the decoder serves."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from infinilm.cache.config import DTYPES
from infinilm.cache.specs import AttentionSpec, CacheSpec
from infinilm.checks import check_choice, check_flag, check_integer, check_real
from infinilm.errors import CheckpointError, InfinilmError, InvalidTypeError, InvalidValueError
from infinilm.models.architectures import (
    ARCHITECTURES,
    FULL_ATTENTION,
    MAX_LAYERS,
    SLIDING_ATTENTION,
    find_model_type,
    read_windows,
)
from infinilm.models.rope_parameters import ROPE_SETTINGS, check_rope_parameters, read_rope_parameters

_ALIASES = {"num_layers": "num_hidden_layers", "torch_dtype": "dtype"}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
# Where null means "there is none" rather than "as usual".
_NULLABLE = ("pad_token_id", "bos_token_id", "eos_token_id", "sliding_window")


@dataclass(init=False, frozen=True)
class LlamaConfig:
    """Hugging Face's Llama configuration, with its names and defaults, and the few settings in which the other
    architectures differ from Llama.

    `num_layers` is taken for `num_hidden_layers`, `torch_dtype` for `dtype`, and `rope_theta` with
    `rope_scaling` for `rope_parameters`.
    """

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = field(init=False)
    """If not given, one for each attention head."""
    head_dim: int = field(init=False)
    """If not given, `hidden_size / num_attention_heads`."""
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = None
    bos_token_id: int | list[int] | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] = field(init=False)
    """`rope_type`, `rope_theta` (if not given: default, 10000) and what the type needs besides."""
    attention_bias: bool = False
    """Whether the q, k, v and o projections add a bias."""
    qkv_bias: bool = False
    """Whether the q, k and v projections alone add a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether the query and key of each head are normalised."""
    sliding_window: int | None = None
    """How many tokens a sliding layer sees, the current one included."""
    layer_types: list[str] | None = None
    """`sliding_attention` or `full_attention` for each layer. None: all are alike."""
    dtype: str | None = None
    """What the checkpoint's weights are stored in, if it says."""

    def __init__(self, **settings: Any) -> None:
        for alias, name in _ALIASES.items():
            if alias in settings:
                if name in settings:
                    raise InvalidTypeError(f"{alias} and {name} are the same setting; give one of them")
                settings[name] = settings.pop(alias)
        names = [item.name for item in fields(self)]
        unknown = settings.keys() - set(names) - set(ROPE_SETTINGS)
        if unknown:
            raise InvalidTypeError(
                f"LlamaConfig has no setting {', '.join(sorted(unknown))}; it has {', '.join(names)}"
            )
        values = {item.name: item.default for item in fields(self) if item.default is not MISSING}
        values |= {name: value for name, value in settings.items() if name in names}
        self._check_sizes(values)
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = values["num_attention_heads"]
        if values.get("head_dim") is None:
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        if values["dtype"] is not None:
            values["dtype"] = str(values["dtype"]).removeprefix("torch.")
            check_choice("dtype", values["dtype"], DTYPES)
        values["rope_parameters"] = read_rope_parameters(settings, values["max_position_embeddings"])
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def _check_sizes(values: Mapping[str, Any]) -> None:
        """Refuse, before anything is derived from them, sizes that are no positive integers."""
        check_integer("num_hidden_layers", values["num_hidden_layers"], low=1, high=MAX_LAYERS)
        for name in _SIZES:
            check_integer(name, values[name], low=1)
        for name in ("num_key_value_heads", "head_dim", "sliding_window"):
            if values.get(name) is not None:
                check_integer(name, values[name], low=1)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read a `config.json`, of transformers 4 or 5. Keys that say nothing of the model's shape are passed over."""
        model_type = find_model_type(config)
        quantization = config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise CheckpointError(
                f"weights quantised by {method!r} can't be read; use an unquantised checkpoint or GGUF"
            )
        architecture = ARCHITECTURES[model_type]
        own = {item.name for item in fields(cls)} - architecture.ignored
        settings: dict[str, Any] = {"num_hidden_layers": cls.num_hidden_layers, **architecture.defaults}
        for name, value in config.items():
            if _ALIASES.get(name) not in config and (value is not None or name in _NULLABLE):
                settings[_ALIASES.get(name, name)] = value
        settings |= read_windows(settings)
        settings = {name: value for name, value in settings.items() if name in (*own, *ROPE_SETTINGS)}
        settings["model_type"] = model_type
        result = cls(**settings)
        result.validate()
        return result

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Self:
        """Read the configuration of a Hugging Face directory or a GGUF file."""
        try:
            return cls.from_dict(_read_config(Path(path)))
        except CheckpointError:
            raise
        except InfinilmError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """All settings, as plain values that `from_dict` reads back."""
        self.validate()
        class_name = ARCHITECTURES[self.model_type].class_name
        uses_window = self.sliding_window is not None
        return {**asdict(self), "architectures": [class_name], "use_sliding_window": uses_window}

    def kv_dim(self) -> int:
        """The numbers that a token's key takes in one layer, over all kv heads; its value takes as many."""
        return self.num_key_value_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """How many tokens a layer sees; None: all."""
        if self.layer_types is not None and self.layer_types[layer] == FULL_ATTENTION:
            return None
        return self.sliding_window

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer keeps per token, over all ranks."""
        heads, head_dim = self.num_key_value_heads, self.head_dim
        return tuple(AttentionSpec(heads, head_dim, self.window(layer)) for layer in range(self.num_hidden_layers))

    def max_context_len(self) -> int:
        """The longest text the model is made for: its positions, times what its rope scaling adds to them."""
        rope = self.rope_parameters
        stretched = {
            "linear": self.max_position_embeddings,
            "dynamic": self.max_position_embeddings,
            "yarn": rope.get("original_max_position_embeddings", 0),
        }
        if rope["rope_type"] not in stretched:
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(stretched[rope["rope_type"]] * rope["factor"]))

    @property
    def rope_theta(self) -> float:
        """The base of the rotary embedding's frequencies."""
        return float(self.rope_parameters["rope_theta"])

    def validate(self) -> None:
        """Check the settings against each other and against what the decoder can do."""
        check_choice("model_type", self.model_type, tuple(ARCHITECTURES))
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise InvalidValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}")
        if self.head_dim == self.hidden_size // heads and self.hidden_size % heads:
            raise InvalidValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={heads} "
                "unless head_dim is given"
            )
        if self.head_dim % 2:
            raise InvalidValueError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs of numbers")
        if self.hidden_act != "silu":
            raise InvalidValueError(f"hidden_act={self.hidden_act!r} is not supported; supported is silu")
        check_real("rms_norm_eps", self.rms_norm_eps, low=0.0, high=1.0, above_low=True)
        for name in ("tie_word_embeddings", "attention_bias", "qkv_bias", "mlp_bias", "qk_norm"):
            check_flag(name, getattr(self, name))
            if getattr(self, name) and name in ARCHITECTURES[self.model_type].ignored:
                raise InvalidValueError(f"{name}=True is not a setting of {self.model_type} models; leave it out")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            _check_token_ids(name, getattr(self, name))
        self._validate_layer_types()
        check_rope_parameters(self.rope_parameters, self.head_dim)

    def _validate_layer_types(self) -> None:
        if self.layer_types is None:
            return
        if not isinstance(self.layer_types, list) or len(self.layer_types) != self.num_hidden_layers:
            raise InvalidValueError(
                f"layer_types={self.layer_types!r} must be a list with one type for each of the "
                f"num_hidden_layers={self.num_hidden_layers} layers"
            )
        for layer_type in self.layer_types:
            check_choice("layer_types", layer_type, (FULL_ATTENTION, SLIDING_ATTENTION))
        if self.sliding_window is None and SLIDING_ATTENTION in self.layer_types:
            raise InvalidValueError("layer_types names sliding_attention, but sliding_window=None; give its size")


def _check_token_ids(name: str, value: object) -> None:
    for token_id in value if isinstance(value, list) else [value]:
        if token_id is not None or isinstance(value, list):
            check_integer(name, token_id, low=0)


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_dir():
        from infinilm.loading.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(path)
        checkpoint.close()
        return checkpoint.config
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: holds a {type(config).__name__}, not an object")
    return config
