"""Checks of single values that several settings share."""

import math

from infinilm.errors import InvalidTypeError, InvalidValueError


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
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name}={value!r} must be True or False")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse anything but one of the names."""
    if not isinstance(value, str):
        raise InvalidTypeError(f"{name}={value!r} must be one of {', '.join(choices)}")
    if value not in choices:
        raise InvalidValueError(f"{name}={value!r} is unknown; use one of {', '.join(choices)}")
