"""The model families, by `model_type`: configuration class and code of each."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import Parameter, get_annotations, signature
from typing import TYPE_CHECKING, Any

from infinilm.errors import CheckpointError, InvalidTypeError, InvalidValueError
from infinilm.models.config import ModelConfig
from infinilm.models.rope_parameters import ROPE_SETTINGS
from infinilm.platforms import require_torch

if TYPE_CHECKING:
    import torch

    from infinilm.distributed.group import CommunicationGroup
    from infinilm.layers.formats import WeightFormats
    from infinilm.models.base import InfinilmModel

ModelBuilder = Callable[..., "InfinilmModel"]
"""Called as `builder(config, max_len=…, dtype=…, device=…, group=…)`. Returns a model with empty weights, or its
rank's share of one. A builder that can keep matrices quantised has a parameter `formats`; one that can build a part of
the layers has a parameter `stage`."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How checkpoints of one `model_type` are read and run.

    The configuration class and the builder may be given as strings, `"file of models/:name"`. Those are imported at
    their first use, because most builders import torch.
    """

    class_name: str
    """The name under `architectures` in a config.json."""
    config_class: type[ModelConfig] | str
    model: ModelBuilder | str
    """The model. Its `weight_targets` and `is_ignorable` give the names of its weights in a checkpoint."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that differ from the configuration class's."""
    is_native: bool = False
    """Whether the configuration alone is enough for `native_model.py` to run the model."""

    @property
    def config(self) -> type[ModelConfig]:
        """The configuration class, imported if needed."""
        found: type[ModelConfig] = _named(self.config_class)
        return found

    @property
    def builder(self) -> ModelBuilder:
        """The model builder, imported if needed."""
        found: ModelBuilder = _named(self.model)
        return found


def _named(target: Any) -> Any:
    """A class or function, imported if only its name is known."""
    if not isinstance(target, str):
        return target
    file, _, name = target.partition(":")
    with require_torch(f"{name} models"):
        return getattr(import_module(f"infinilm.models.{file}"), name)


def _native(class_name: str, config: str, model: str = "CausalLM") -> ModelFamily:
    return ModelFamily(class_name, config, model if ":" in model else f"causal_lm:{model}", is_native=True)


FAMILIES: dict[str, ModelFamily] = {
    "llama": _native("LlamaForCausalLM", "dense:LlamaConfig"),
    "mistral": _native("MistralForCausalLM", "dense:MistralConfig"),
    "qwen2": _native("Qwen2ForCausalLM", "dense:Qwen2Config"),
    "qwen3": _native("Qwen3ForCausalLM", "dense:Qwen3Config"),
    "ministral": _native("MinistralForCausalLM", "dense:MistralConfig"),
    "ministral3": _native("Ministral3ForCausalLM", "dense:Ministral3Config"),
    "gemma2": _native("Gemma2ForCausalLM", "gemma:Gemma2Config", "GemmaForCausalLM"),
    "gemma3_text": _native("Gemma3ForCausalLM", "gemma:Gemma3Config", "GemmaForCausalLM"),
    "gemma4_text": _native("Gemma4ForCausalLM", "gemma4:Gemma4Config", "gemma4_lm:Gemma4ForCausalLM"),
    "deepseek_v2": _native("DeepseekV2ForCausalLM", "latent:DeepseekV2Config", "latent_lm:DeepseekForCausalLM"),
    "deepseek_v3": _native("DeepseekV3ForCausalLM", "latent:DeepseekV3Config", "latent_lm:DeepseekForCausalLM"),
    "glm4": _native("Glm4ForCausalLM", "relatives:Glm4Config", "Glm4ForCausalLM"),
    "glm4_moe": _native("Glm4MoeForCausalLM", "sparse:Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "gpt_oss": _native("GptOssForCausalLM", "sparse:GptOssConfig", "GptOssForCausalLM"),
    "mixtral": _native("MixtralForCausalLM", "sparse:MixtralConfig", "MixtralForCausalLM"),
    "qwen3_moe": _native("Qwen3MoeForCausalLM", "sparse:Qwen3MoeConfig", "SparseCausalLM"),
    "granite": _native("GraniteForCausalLM", "relatives:GraniteConfig"),
    "olmo2": _native("Olmo2ForCausalLM", "relatives:Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": _native("Olmo3ForCausalLM", "relatives:Olmo3Config", "Olmo2ForCausalLM"),
    "phi3": _native("Phi3ForCausalLM", "relatives:Phi3Config"),
    "qwen3_5_text": _native("Qwen3_5ForCausalLM", "hybrid:Qwen35Config", "hybrid_lm:Qwen35ForCausalLM"),
    "qwen3_5_moe_text": _native("Qwen3_5MoeForCausalLM", "hybrid:Qwen35MoeConfig", "hybrid_lm:Qwen35MoeForCausalLM"),
    "qwen3_next": _native("Qwen3NextForCausalLM", "hybrid:Qwen3NextConfig", "hybrid_lm:Qwen35MoeForCausalLM"),
    "smollm3": _native("SmolLM3ForCausalLM", "relatives:SmolLM3Config"),
}
"""The families by `model_type`. `register_model` adds to them."""
_BUILT_IN = frozenset(FAMILIES)


def register_model(
    model_type: str,
    class_name: str,
    *,
    config: type[ModelConfig] | None = None,
    defaults: Mapping[str, Any] | None = None,
    builder: ModelBuilder | None = None,
) -> None:
    """Add a family, so that its checkpoints can be loaded.

    `model_type` and `class_name` are the values of `model_type` and `architectures` in its config.json. `config` is a
    dataclass that adds its own settings to `ModelConfig` or `LlamaConfig`; the `builder` gets an instance of it.
    `defaults` override the class's defaults, for example `{"qk_norm": True}`. The default of `builder` is Llama's
    model, and the default of `config` is Llama's configuration.
    """
    llama = FAMILIES["llama"]
    config = config or llama.config
    if model_type in FAMILIES:
        raise InvalidValueError(f"model_type={model_type!r} is registered already; choose another name")
    _check_config_class(config, builder)
    known = [*config.setting_names(), *ROPE_SETTINGS, *config.window_settings]
    if unknown := (defaults or {}).keys() - set(known):
        raise InvalidValueError(
            f"defaults of model_type={model_type!r}: {config.__name__} has no setting {', '.join(sorted(unknown))}; "
            f"it has {', '.join(known)}"
        )
    is_native = builder is None and config is llama.config
    FAMILIES[model_type] = ModelFamily(class_name, config, builder or llama.model, dict(defaults or {}), is_native)


def _check_config_class(config: type[ModelConfig], builder: ModelBuilder | None) -> None:
    if not (isinstance(config, type) and issubclass(config, ModelConfig)):
        raise InvalidTypeError(f"config={config!r} must be a subclass of ModelConfig")
    llama = FAMILIES["llama"]
    if (builder is None or builder is llama.builder) and not issubclass(config, llama.config):
        raise InvalidTypeError(f"{config.__name__} is no LlamaConfig, so the model can't be Llama's; give a builder")
    own = [name for name, hint in get_annotations(config).items() if "ClassVar" not in str(hint)]
    if missing := set(own) - set(config.setting_names()):
        raise InvalidTypeError(
            f"{config.__name__} is no dataclass, so {', '.join(sorted(missing))} would be no settings; "
            "decorate it with @dataclass(frozen=True)"
        )


def find_model_type(config: Mapping[str, Any]) -> str:
    """The key in `FAMILIES` of a config.json, from its `model_type` or else its `architectures`."""
    by_class = {family.class_name: name for name, family in FAMILIES.items()}
    classes = config.get("architectures") or []
    if not isinstance(classes, list):
        raise CheckpointError(f"architectures={classes!r} must be a list of names")
    model_type = config.get("model_type") or next(
        (by_class[str(name)] for name in classes if str(name) in by_class), ""
    )
    family = FAMILIES.get(str(model_type))
    if family is None or (classes and family.class_name not in classes):
        raise CheckpointError(
            f"model_type={config.get('model_type')!r}, architectures={classes!r} is not supported; "
            f"supported are {', '.join(f'{name} ({kind})' for kind, name in by_class.items())}"
        )
    return str(model_type)


def create_model(
    config: ModelConfig,
    *,
    max_len: int | None = None,
    dtype: "torch.dtype | None" = None,
    device: "torch.device | str" = "cpu",
    group: "CommunicationGroup | None" = None,
    formats: "WeightFormats | None" = None,
    num_stages: int = 1,
    stage: int = 0,
) -> "InfinilmModel":
    """Build the model that a configuration describes, with empty weights, for texts of up to `max_len` tokens.

    Non-empty `formats` need a model that `keeps_quantized`. With several pipeline stages, only the layers of `stage`
    are built. By default the model is dense, in float32, for one rank.
    """
    import torch

    from infinilm.distributed.group import SINGLE, CommunicationGroup, RankInfo
    from infinilm.layers.formats import DENSE
    from infinilm.layers.linear import check_heads
    from infinilm.models.stages import divide_layers

    dtype, group, formats = dtype or torch.float32, group or SINGLE, formats or DENSE
    config.validate()
    check_heads(config.num_attention_heads, config.num_key_value_heads, group.size)
    builder = FAMILIES[config.model_type].builder
    more: dict[str, Any] = {"formats": formats} if formats.by_name or _takes_formats(builder) else {}
    if num_stages == 1:
        return builder(config, max_len=max_len, dtype=dtype, device=device, group=group, **more)
    meta = torch.device("meta")
    outline_group = CommunicationGroup(RankInfo(0, group.size, meta))  # the same on all ranks
    whole = builder(config, max_len=1, dtype=dtype, device=meta, group=outline_group, **more)
    more["stage"] = divide_layers(
        whole.weight_targets(), config.num_hidden_layers, num_stages, is_tied=config.tie_word_embeddings
    )[stage]
    parameters = signature(builder).parameters.values()
    if any(each.name == "stage" or each.kind is Parameter.VAR_KEYWORD for each in parameters):
        model = builder(config, max_len=max_len, dtype=dtype, device=device, group=group, **more)
        if getattr(model, "stage", None) == more["stage"]:
            return model
    raise InvalidValueError(
        f"pipeline_parallel_size={num_stages}: the builder of model_type={config.model_type!r} can't build a part of "
        "the model; give it a parameter `stage`, and its model an attribute, or use pipeline_parallel_size=1"
    )


class InfinilmModelFactory:
    """`create_model` and `register_model` under InfiniLM's names."""

    createModel = create_model = staticmethod(create_model)  # noqa: N815 - the name in InfiniLM
    register = staticmethod(register_model)


def keeps_quantized(model_type: str) -> bool:
    """Whether models of this type can keep matrices quantised, in the native library or on a GPU."""
    return FAMILIES[model_type].is_native or _takes_formats(FAMILIES[model_type].builder)


def _takes_formats(builder: Any) -> bool:
    return "formats" in signature(builder).parameters


def describe_registration(model_type: str) -> dict[str, Any] | None:
    """What another process needs to register the same family; None for a built-in family."""
    if model_type in _BUILT_IN:
        return None
    family = FAMILIES[model_type]
    return {
        "model_type": model_type,
        "class_name": family.class_name,
        "defaults": family.defaults,
        "config": describe_import(f"configuration class of model_type={model_type!r}", family.config),
        "builder": describe_import(f"builder of model_type={model_type!r}", family.builder),
    }


def describe_import(what: str, target: object) -> list[str]:
    """The module and the name by which another process can import `target`; errors call it `what`."""
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not target:
        raise InvalidValueError(
            f"the {what}, {module}.{name}, can't be imported by other processes, as tensor parallelism needs; "
            "define it at the top level of a module"
        )
    return [module, name]


def import_described(described: Sequence[str]) -> Any:
    """Import the object that `describe_import` described."""
    module, name = described
    return getattr(import_module(module), name)


def register_described(registration: Mapping[str, Any]) -> None:
    """Register the family that `describe_registration` described, unless importing its modules registers it."""
    config, builder = import_described(registration["config"]), import_described(registration["builder"])
    if registration["model_type"] not in FAMILIES:
        register_model(
            registration["model_type"],
            registration["class_name"],
            config=config,
            defaults=registration["defaults"],
            builder=builder,
        )
