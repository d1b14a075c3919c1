"""Checks of single values that several settings share."""

import math
from collections.abc import Sequence
from dataclasses import fields
from reprlib import repr as short_repr
from typing import Any, NoReturn

from infinilm.errors import InvalidTypeError, InvalidValueError


def plain_number(value: Any) -> Any:
    """A NumPy number, or an array or tensor without dimensions, as a Python number; anything else unchanged."""
    return value.item() if _num_dimensions(value) == 0 else value


def plain_items(value: Any) -> Any:
    """The items of a list, tuple, or one-dimensional array or tensor, as a tuple; anything else unchanged."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        return tuple(map(plain_number, value))
    return tuple(value.tolist()) if _num_dimensions(value) == 1 else value


def _num_dimensions(value: Any) -> int | None:
    """The number of dimensions of a readable NumPy or torch value; None for anything else. Imports neither package."""
    if type(value).__module__.partition(".")[0] not in ("numpy", "torch"):
        return None
    is_readable = not any(getattr(value, name, False) for name in ("is_nested", "is_meta", "is_sparse"))
    return getattr(value, "ndim", None) if is_readable else None


def make_numbers_plain(settings: object) -> None:
    """Convert NumPy numbers among a frozen dataclass's values to Python numbers."""
    for each in fields(settings):  # type: ignore[arg-type]
        object.__setattr__(settings, each.name, plain_number(getattr(settings, each.name)))


def check_text(name: str, value: object) -> None:
    """Refuse anything but a string that UTF-8 can express."""
    if not isinstance(value, str):
        raise InvalidTypeError(f"{name}={short_repr(value)} must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidValueError(
            f"{name} has a lone surrogate {value[error.start]!a} at character {error.start}, which UTF-8 cannot express"
        ) from None


class FrozenDict(dict[Any, Any]):
    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise InvalidTypeError("these values can't be changed; make new settings instead")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[type["FrozenDict"], tuple[dict[Any, Any]]]:
        return FrozenDict, (dict(self),)


class FrozenList(list[Any]):
    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise InvalidTypeError("this list can't be changed; assign a new one instead")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = clear = extend = insert = pop = remove = _refuse
    reverse = sort = _refuse

    def __reduce__(self) -> tuple[type["FrozenList"], tuple[list[Any]]]:
        return FrozenList, (list(self),)


def check_integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    """Refuse anything but an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"{name}={value!r} must be an integer")
    if value < low or (high is not None and value > high):
        limit = f"{low} or more" if high is None else f"{low} to {high}"
        raise InvalidValueError(f"{name}={value!r} is out of range; use {limit}")


def check_real(name: str, value: object, *, low: float, high: float, above_low: bool = False) -> None:
    """Refuse anything but a finite number from `low` (left out if `above_low`) to `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidTypeError(f"{name}={value!r} must be a number")
    inside = (low < value if above_low else low <= value) and value <= high
    if not math.isfinite(value) or not inside:
        bracket = "(" if above_low else "["
        raise InvalidValueError(f"{name}={value!r} is out of range; use a number in {bracket}{low:g}, {high:g}]")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name}={value!r} must be True or False")


def check_activation_bits(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"activation_bits={value!r} must be the integer 16 or 8")
    if value not in (8, 16):
        raise InvalidValueError(f"activation_bits={value!r} must be 16, or 8 for faster prompts")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise InvalidTypeError(f"{name}={value!r} must be one of {', '.join(choices)}")
    if value not in choices:
        raise InvalidValueError(f"{name}={value!r} is unknown; use one of {', '.join(choices)}")
