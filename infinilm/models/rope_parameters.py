"""Reading and checking the settings of the rotary position embedding, in all forms that config files use."""

from collections.abc import Mapping
from typing import Any

from infinilm.errors import InvalidTypeError, InvalidValueError

DEFAULT_THETA = 10000.0
_MAX_NUMBER = 1e18

ROPE_SETTINGS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings")
"""Settings outside `rope_parameters` that are merged into it."""

# The values that each type needs besides `rope_theta`: numbers, and lists with one number per pair of a head.
_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "none": (),
    "proportional": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
}
_LISTS: dict[str, tuple[str, ...]] = {"longrope": ("short_factor", "long_factor")}
_OPTIONAL_NUMBERS = (
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "llama_4_scaling_beta"),
)
_OLD_NAMES = {"su": "longrope"}


def read_rope_parameters(
    settings: Mapping[str, Any], max_position_embeddings: int, default_theta: float = DEFAULT_THETA
) -> dict[str, Any]:
    """Bring the rope settings of a config into one form: `rope_type`, `rope_theta` and the values that the type needs.

    Transformers 5 writes `rope_parameters`. Transformers 4 wrote `rope_theta`, and `rope_scaling` with a `type` or
    `rope_type` in it.
    """
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise InvalidTypeError(f"rope_parameters={given!r} must be a dict")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise InvalidValueError(f"rope_parameters={given!r} differ between layers, which is not supported")
    rope = {name: value for name, value in given.items() if name != "type"}
    rope_type = str(given.get("rope_type") or given.get("type") or "default")
    rope["rope_type"] = _OLD_NAMES.get(rope_type, rope_type)
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = settings.get("rope_theta") or default_theta
    if "partial_rotary_factor" in settings:
        rope.setdefault("partial_rotary_factor", settings["partial_rotary_factor"])
    if "original_max_position_embeddings" in _NUMBERS.get(rope["rope_type"], ()):
        original = settings.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or max_position_embeddings
        if rope["rope_type"] != "llama3" and rope.get("factor") is None:
            _check_number("original_max_position_embeddings", rope["original_max_position_embeddings"])
            rope["factor"] = max_position_embeddings / rope["original_max_position_embeddings"]
    return rope


def read_rope_by_type(
    settings: Mapping[str, Any], max_position_embeddings: int, default_thetas: Mapping[str, float]
) -> dict[str, Any]:
    """The same for each of the layer types `full_attention` and `sliding_attention`, which have different thetas.

    Older files have `rope_scaling` and `rope_theta` for full layers, and the theta of sliding layers as
    `rope_local_base_freq`.
    """
    given = settings.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise InvalidTypeError(f"rope_parameters={given!r} must be a dict")
    if not any(isinstance(rope, Mapping) for rope in given.values()):
        given = {"full_attention": given}
    thetas = {"full_attention": settings.get("rope_theta"), "sliding_attention": settings.get("rope_local_base_freq")}
    found = {}
    for kind, default_theta in default_thetas.items():
        scaling = settings.get("rope_scaling") if kind == "full_attention" else None
        own = {"rope_parameters": {**(scaling or {}), **(given.get(kind) or {})}, "rope_theta": thetas[kind]}
        found[kind] = read_rope_parameters(own, max_position_embeddings, default_theta)
    return found


def check_rope_parameters(rope: Mapping[str, Any], head_dim: int) -> None:
    """Refuse unknown types and invalid values. Errors name the setting."""
    rope_type = rope["rope_type"]
    if rope_type not in _NUMBERS:
        raise InvalidValueError(f"rope_type={rope_type!r} is not supported; supported are {', '.join(_NUMBERS)}")
    factor = rope.get("partial_rotary_factor")
    if factor is not None:
        _check_number("partial_rotary_factor", factor)
        if factor > 1 or int(head_dim * factor) % 2 or int(head_dim * factor) == 0:
            raise InvalidValueError(
                f"partial_rotary_factor={factor!r} must make an even part of head_dim={head_dim}, not "
                f"{int(head_dim * factor)}"
            )
        head_dim = int(head_dim * factor)
    label = f"rope_parameters[{{!r}}] of rope_type={rope_type!r}"
    for name in ("rope_theta", *_NUMBERS[rope_type]):
        _check_number(label.format(name), rope.get(name))
    for name in _OPTIONAL_NUMBERS:
        if rope.get(name) is not None:
            _check_number(label.format(name), rope[name])
    for name in _LISTS.get(rope_type, ()):
        values = rope.get(name)
        if not isinstance(values, (list, tuple)) or len(values) != head_dim // 2:
            raise InvalidValueError(
                f"{label.format(name)} must be a list of {head_dim // 2} numbers, one per rotated pair, not {values!r}"
            )
        for value in values:
            _check_number(label.format(name), value)
    _check_formulas(rope, head_dim)


def _check_formulas(rope: Mapping[str, Any], head_dim: int) -> None:
    """Refuse values that would cause a division by zero: by the logarithm of 1, or by a difference of equal numbers."""
    if rope["rope_theta"] <= 1:
        raise InvalidValueError(f"rope_theta={rope['rope_theta']} must be greater than 1")
    needs_original = "original_max_position_embeddings" in _NUMBERS[rope["rope_type"]]
    if rope.get("llama_4_scaling_beta") is not None and not needs_original:
        _check_number(
            "rope_parameters['original_max_position_embeddings']", rope.get("original_max_position_embeddings")
        )
    if needs_original and rope["original_max_position_embeddings"] <= 1:
        raise InvalidValueError(
            f"original_max_position_embeddings={rope['original_max_position_embeddings']} must be greater than 1"
        )
    if rope["rope_type"] == "dynamic" and head_dim <= 2:
        raise InvalidValueError(f"head_dim={head_dim} must be greater than 2 for rope_type='dynamic'")
    if rope["rope_type"] == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise InvalidValueError(
            f"high_freq_factor={rope['high_freq_factor']} must be greater than "
            f"low_freq_factor={rope['low_freq_factor']} for rope_type='llama3'"
        )


def _check_number(label: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidValueError(f"{label} must be a number, not {value!r}")
    if not 0 < value <= _MAX_NUMBER:
        raise InvalidValueError(f"{label} must be a positive number, not {value!r}")
