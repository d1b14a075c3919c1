"""Model configurations: the base of all families, and how a `config.json` is read."""

import json
import logging
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from infinilm.cache.config import DTYPES
from infinilm.cache.specs import AttentionSpec, CacheSpec
from infinilm.checks import check_choice, check_flag, check_integer, check_real
from infinilm.errors import CheckpointError, InfinilmError, InvalidTypeError, InvalidValueError
from infinilm.loading.quantized_config import METHODS, find_method
from infinilm.models.rope_parameters import (
    DEFAULT_THETA,
    ROPE_SETTINGS,
    check_rope_parameters,
    read_rope_by_type,
    read_rope_parameters,
)

if TYPE_CHECKING:
    from infinilm.models.registry import ModelFamily

logger = logging.getLogger(__name__)

MAX_LAYERS = 10_000
"""More layers than any model has: a config with more of them is damaged."""
MAX_SIZE = 2**40
"""The same limit for all other sizes except lengths of texts."""
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
# Keys of Hugging Face's configurations that do not affect results, or that are read elsewhere.
_NEUTRAL_KEYS = frozenset(
    (
        *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures"),
        *("attention_dropout", "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache"),
        *(
            "_sliding_window_pattern",
            "auto_map",
            "chunk_size_feed_forward",
            "embd_pdrop",
            "finetuning_task",
            "hidden_dropout",
            "qk_head_dim",
            "id2label",
        ),
        *("is_decoder", "is_encoder_decoder", "label2id", "mlp_dropout", "output_attentions"),
        *(
            "num_mtp_layers",
            "num_nextn_predict_layers",
            "output_hidden_states",
            "output_router_logits",
            "pretraining_tp",
            "problem_type",
            "quantization_config",
        ),
        *(
            "resid_pdrop",
            "return_dict",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "task_specific_params",
            "tokenizer_class",
        ),
    )
)
# The neutral keys that could request another behaviour, each with the only supported value.
_NEUTRAL_VALUES = {
    "is_encoder_decoder": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
    "quantization_config": None,
    "return_dict": True,
    "use_bfloat16": False,
    "use_cache": True,
}
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(init=False, frozen=True)
class ModelConfig:
    """The settings that all families share, with Hugging Face's names.

    A family's class is a dataclass that adds settings and changes defaults; `models/registry.py` lists the classes by
    `model_type`. `num_layers` is accepted for `num_hidden_layers`, `torch_dtype` for `dtype`, and `rope_theta` with
    `rope_scaling` for `rope_parameters`; these names can also be read. Hugging Face's settings for training, and those
    whose value asks for the normal behaviour (`use_cache=True`), are accepted and dropped.
    """

    model_type: str = ""
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = field(init=False)
    """Default: `num_attention_heads`."""
    head_dim: int = field(init=False)
    """Default: `hidden_size / num_attention_heads`."""
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = None
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] = field(init=False)
    """`rope_type` (default: `default`), `rope_theta` (default: 10000) and the other values that the type needs."""
    sliding_window: int | None = None
    """The number of tokens that a sliding layer sees, including the current one."""
    layer_types: list[str] | None = None
    """`sliding_attention` or `full_attention` for each layer. None: all layers are of the same type."""
    dtype: str | None = None
    """The type of the checkpoint's weights, if the config names it."""
    initializer_range: float = 0.02
    """The standard deviation of the weights of a model that is built without a checkpoint."""

    aliases: ClassVar[Mapping[str, str]] = {"num_layers": "num_hidden_layers", "torch_dtype": "dtype"}
    """Other names of settings."""
    exceeds_float16: ClassVar[bool] = False
    """Whether hidden states can exceed the range of float16."""
    default_theta: ClassVar[float] = DEFAULT_THETA
    sliding_theta: ClassVar[float | None] = None
    """The default theta of sliding layers, if they have their own rotary embedding. `rope_parameters` then has an entry
    for each layer type."""
    rotates_partially: ClassVar[bool] = False
    """Whether `partial_rotary_factor` may be less than 1."""
    window_settings: ClassVar[Mapping[str, Any]] = {"use_sliding_window": False, "max_window_layers": 0}
    """Keys of a config.json that determine `sliding_window` and `layer_types`, with the family's defaults."""
    readable_quantizations: ClassVar[frozenset[str]] = frozenset(METHODS)
    """The methods of `quantization_config` that can be read."""
    known_layer_types: ClassVar[tuple[str, ...]] = (FULL_ATTENTION, SLIDING_ATTENTION)
    ignored_settings: ClassVar[frozenset[str]] = frozenset()
    """Flags that Hugging Face's class of the family ignores, but that a config.json may contain."""

    def __init_subclass__(cls) -> None:
        # With __init__ in the class's own namespace, a plain `@dataclass(frozen=True)` does not generate one.
        cls.__init__ = cls.__init__  # type: ignore[method-assign]

    def __init__(self, **settings: Any) -> None:
        for alias, name in self.aliases.items():
            if alias in settings:
                if name in settings:
                    raise InvalidTypeError(f"{alias} and {name} are the same setting; give one of them")
                settings[name] = settings.pop(alias)
        names = self.setting_names()
        if unknown := settings.keys() - {*names, *ROPE_SETTINGS, *_NEUTRAL_KEYS}:
            raise InvalidTypeError(
                f"{type(self).__name__} has no setting {', '.join(sorted(unknown))}; it has {', '.join(names)}"
            )
        for name, neutral in _NEUTRAL_VALUES.items():
            if settings.get(name, neutral) not in (neutral, None):
                raise InvalidValueError(f"{name}={settings[name]!r} is not supported; use {neutral}, or leave it out")
        values = {item.name: item.default for item in fields(self) if item.default is not MISSING}
        values |= {item.name: item.default_factory() for item in fields(self) if item.default_factory is not MISSING}
        values |= {name: value for name, value in settings.items() if name in names}
        self._check_sizes(values)
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = values["num_attention_heads"]
        if values.get("head_dim") is None:
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        if values["dtype"] is not None:
            values["dtype"] = str(values["dtype"]).removeprefix("torch.")
            check_choice("dtype", values["dtype"], DTYPES)
        for name in _TOKEN_IDS:
            _check_token_ids(name, values[name])
        values["rope_parameters"] = self.read_rope(settings, values["max_position_embeddings"])
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def read_rope(cls, settings: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
        """`rope_parameters`, from any of the forms in which settings give them."""
        if cls.sliding_theta is None:
            return read_rope_parameters(settings, max_position_embeddings, cls.default_theta)
        thetas = {FULL_ATTENTION: cls.default_theta, SLIDING_ATTENTION: cls.sliding_theta}
        return read_rope_by_type(settings, max_position_embeddings, thetas)

    @staticmethod
    def _check_sizes(values: Mapping[str, Any]) -> None:
        """Refuse sizes that are not positive integers, or too large, before anything is derived from them."""
        check_integer("num_hidden_layers", values["num_hidden_layers"], low=1, high=MAX_LAYERS)
        for name in _SIZES:
            check_integer(name, values[name], low=1)
        for name in ("num_key_value_heads", "head_dim", "sliding_window"):
            if values.get(name) is not None:
                check_integer(name, values[name], low=1)
        for name, value in values.items():
            if type(value) is int and value > MAX_SIZE and name not in ("max_position_embeddings", "sliding_window"):
                raise InvalidValueError(f"{name}={value} must be {MAX_SIZE} at most: no model has more")

    @classmethod
    def setting_names(cls) -> list[str]:
        """The names of all settings."""
        return [item.name for item in fields(cls)]

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> "ModelConfig":
        """Read a `config.json` of transformers 4 or 5 into the configuration class of its family.

        One log line names the keys that the family does not know.
        """
        from infinilm.models.registry import FAMILIES, find_model_type

        config = text_config(config)
        model_type = find_model_type(config)
        method = find_method(config)
        if method is not None and method not in FAMILIES[model_type].config.readable_quantizations:
            raise CheckpointError(
                f"weights of model_type={model_type!r} quantised by {method!r} can't be read; use an unquantised "
                "checkpoint or GGUF"
            )
        family = FAMILIES[model_type]
        result = family.config._read(config, {**family.defaults, "model_type": model_type})
        result.validate()
        return result

    @classmethod
    def _read(cls, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Self:
        # Settings for which null means "there is none" rather than "the default".
        nullable = {item.name for item in fields(cls) if "None" in str(item.type) or "Optional" in str(item.type)}
        settings: dict[str, Any] = {"num_hidden_layers": cls.num_hidden_layers, **cls.window_settings, **defaults}
        for name, value in config.items():
            if cls.aliases.get(name) not in config and (value is not None or name in nullable):
                settings[cls.aliases.get(name, name)] = value
        settings |= cls._read_windows(settings)
        read = {*cls.setting_names(), *ROPE_SETTINGS} - cls.ignored_settings
        known = read | {*cls.aliases, *cls.window_settings, *_NEUTRAL_KEYS}
        known |= {name for name in cls.ignored_settings if config.get(name) is False}
        if unknown := sorted(str(name) for name, value in config.items() if name not in known and value is not None):
            logger.info("%s does not know these keys of config.json: %s", cls.__name__, ", ".join(unknown))
        settings = {name: value for name, value in settings.items() if name in read}
        return cls(**settings | {"model_type": defaults["model_type"]})

    @staticmethod
    def _read_windows(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Derive `sliding_window` and `layer_types` from a config's keys.

        The window applies only with `use_sliding_window`, and then from layer `max_window_layers` on, unless
        `layer_types` is given.
        """
        window = settings.get("sliding_window") if settings["use_sliding_window"] else None
        if window is None:
            return {"sliding_window": None, "layer_types": None}
        first, count = settings["max_window_layers"], settings["num_hidden_layers"]
        check_integer("max_window_layers", first, low=0)
        check_integer("num_hidden_layers", count, low=1, high=MAX_LAYERS)
        types = [SLIDING_ATTENTION if layer >= first else FULL_ATTENTION for layer in range(count)]
        return {"sliding_window": window, "layer_types": settings.get("layer_types") or types}

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ModelConfig":
        """Read the configuration of a Hugging Face directory or a GGUF file; see `from_dict`."""
        try:
            return cls.from_dict(_read_config(Path(path)))
        except CheckpointError:
            raise
        except InfinilmError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """All settings, as plain values that `from_dict` reads back."""
        self.validate()
        uses_window = self.sliding_window is not None
        return {**asdict(self), "architectures": [self._family.class_name], "use_sliding_window": uses_window}

    @property
    def _family(self) -> "ModelFamily":
        from infinilm.models.registry import FAMILIES

        check_choice("model_type", self.model_type, tuple(FAMILIES))
        return FAMILIES[self.model_type]

    def kv_dim(self) -> int:
        """The size of a token's key in one layer, over all kv heads; its value has the same size."""
        return self.num_key_value_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """The number of tokens that a layer sees; None: all."""
        if self.layer_types is not None and self.layer_types[layer] == FULL_ATTENTION:
            return None
        return self.sliding_window

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings."""
        return 1.0

    @property
    def residual_scale(self) -> float:
        """The factor of a mixer's result before the residual is added."""
        return 1.0

    @property
    def logit_scale(self) -> float:
        """The factor of logits."""
        return 1.0

    @property
    def logit_cap(self) -> float | None:
        """Logits become `cap * tanh(logits / cap)`; None: no cap."""
        return None

    @property
    def attention_scale(self) -> float | None:
        """The factor of attention scores; None: `head_dim**-0.5`."""
        return None

    @property
    def attention_cap(self) -> float | None:
        """Attention scores become `cap * tanh(score / cap)`; None: no cap."""
        return None

    def rope(self, layer: int) -> Mapping[str, Any]:
        """The rope parameters of a layer."""
        if self.sliding_theta is None:
            return self.rope_parameters
        rope: Mapping[str, Any] = self.rope_parameters[
            FULL_ATTENTION if self.window(layer) is None else SLIDING_ATTENTION
        ]
        return rope

    def layer_head_dim(self, layer: int) -> int:  # noqa: ARG002 - a family's layers may differ
        """The size of a layer's heads."""
        return self.head_dim

    def layer_kv_heads(self, layer: int) -> int:  # noqa: ARG002 - a family's layers may differ
        """The number of a layer's kv heads."""
        return self.num_key_value_heads

    @property
    def max_head_dim(self) -> int:
        """The largest head size of any layer."""
        return max(map(self.layer_head_dim, range(self.num_hidden_layers)))

    @property
    def max_group(self) -> int:
        """The largest number of query heads that share a kv head."""
        return self.num_attention_heads // min(map(self.layer_kv_heads, range(self.num_hidden_layers)))

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer stores per token, over all ranks."""
        heads, head_dim = self.num_key_value_heads, self.head_dim
        return tuple(AttentionSpec(heads, head_dim, self.window(layer)) for layer in range(self.num_hidden_layers))

    def channel_width(self, num_ranks: int) -> int:
        """The size of a channel mixer's intermediate tensors per token, on one of `num_ranks`: gate, up and product."""
        return 3 * self.intermediate_size // num_ranks

    def count_experts(self) -> dict[str, int] | None:
        """The numbers of experts: `count`, `per_token`, `size` and `layers` with experts; None: there are none."""
        return None

    def is_ignorable(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that the model does not use."""
        return name.endswith("rotary_emb.inv_freq") or (self.tie_word_embeddings and name == "lm_head.weight")

    def max_context_len(self) -> int:
        """The longest text that the model supports: its positions, times the factor of its rope scaling."""
        rope = self.main_rope
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
        return float(self.main_rope["rope_theta"])

    @property
    def main_rope(self) -> Mapping[str, Any]:
        """The rope parameters of the layers with full attention."""
        rope: Mapping[str, Any] = self.rope_parameters
        return rope if self.sliding_theta is None else rope[FULL_ATTENTION]

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """`main_rope` without `rope_theta`; None if positions are not scaled."""
        if self.main_rope["rope_type"] == "default":
            return None
        return {name: value for name, value in self.main_rope.items() if name != "rope_theta"}

    @property
    def num_layers(self) -> int:
        """`num_hidden_layers`."""
        return self.num_hidden_layers

    @property
    def torch_dtype(self) -> str | None:
        """`dtype`."""
        return self.dtype

    def validate(self) -> None:
        """Check the settings against each other and against the limits of the model's code."""
        own = self._family.config
        if missing := set(own.setting_names()) - set(self.setting_names()):
            raise InvalidValueError(
                f"model_type={self.model_type!r} has settings that {type(self).__name__} lacks: "
                f"{', '.join(sorted(missing))}; use {own.__name__}"
            )
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
        check_real("rms_norm_eps", self.rms_norm_eps, low=0.0, high=1.0, above_low=True)
        check_flag("tie_word_embeddings", self.tie_word_embeddings)
        check_real("initializer_range", self.initializer_range, low=0.0, high=1e3)
        self._validate_layer_types()
        ropes = {id(rope): (rope, layer) for layer, rope in enumerate(map(self.rope, range(self.num_hidden_layers)))}
        for rope, layer in ropes.values():
            if rope.get("partial_rotary_factor") not in (None, 1.0) and not self.rotates_partially:
                raise InvalidValueError(
                    f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not a setting of {self.model_type} "
                    "models; they rotate whole heads (1.0)"
                )
            check_rope_parameters(rope, self.layer_head_dim(layer))

    def _validate_layer_types(self) -> None:
        if self.layer_types is None:
            return
        if not isinstance(self.layer_types, list) or len(self.layer_types) != self.num_hidden_layers:
            raise InvalidValueError(
                f"layer_types={self.layer_types!r} must be a list with one type for each of the "
                f"num_hidden_layers={self.num_hidden_layers} layers"
            )
        for layer_type in self.layer_types:
            check_choice("layer_types", layer_type, self.known_layer_types)
        if self.sliding_window is None and SLIDING_ATTENTION in self.layer_types:
            raise InvalidValueError("layer_types names sliding_attention, but sliding_window=None; give its size")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal `config.json`; other configs are returned unchanged."""
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, Mapping) or not text.get("model_type"):
        raise CheckpointError(f"text_config={text!r:.80} must be the configuration of a model, with its model_type")
    shared = ("dtype", "torch_dtype", "quantization_config", *_TOKEN_IDS)
    found = {name: config[name] for name in shared if config.get(name) is not None and name not in text} | dict(text)
    tied = config.get("tie_word_embeddings")  # the whole model's value wins, as in transformers
    return found if tied is None else found | {"tie_word_embeddings": tied}


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
