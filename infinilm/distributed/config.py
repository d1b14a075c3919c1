"""The devices of a model's ranks."""

from collections.abc import Sequence

from infinilm.checks import FrozenList
from infinilm.errors import InvalidTypeError, InvalidValueError


class DistConfig:
    """One rank per entry of `tp_device_ids`: tensor parallelism in each of `pp_size` pipeline stages.

    `DistConfig()` is one rank on device 0, `DistConfig(4)` four ranks on devices 0 to 3,
    `DistConfig([0, 2])` or `DistConfig(tp_device_ids=[0, 2])` names the devices. `DistConfig(2, pp_size=3)` is three
    stages of two ranks, on devices 0 to 5, those of the first stage first.
    """

    def __init__(
        self,
        tp_size: int | Sequence[int] | None = None,
        tp_device_ids: Sequence[int] | None = None,
        *,
        pp_size: int = 1,
    ) -> None:
        self._pp_size = _check_size("pp_size", pp_size)
        if tp_size is not None and tp_device_ids is not None:
            raise InvalidValueError(
                f"tp_size={tp_size!r} and tp_device_ids={list(tp_device_ids)!r} were both given; give one of them"
            )
        if isinstance(tp_size, list | tuple | range):
            tp_size, tp_device_ids = None, tp_size
        if tp_device_ids is not None:
            self.tp_device_ids = tp_device_ids
            return
        self.tp_device_ids = range(_check_size("tp_size", 1 if tp_size is None else tp_size) * pp_size)

    @property
    def tp_device_ids(self) -> list[int]:
        """The device of each rank. The list refuses changes; assign another to change it."""
        return self._tp_device_ids

    @tp_device_ids.setter
    def tp_device_ids(self, ids: Sequence[int]) -> None:
        checked = list(ids)
        if not checked:
            raise InvalidValueError("tp_device_ids is empty; name at least one device")
        for device in checked:
            if isinstance(device, bool) or not isinstance(device, int):
                raise InvalidTypeError(f"tp_device_ids holds {device!r}; device ids are integers")
            if device < 0:
                raise InvalidValueError(f"tp_device_ids holds {device}; device ids are 0 or more")
        if len(set(checked)) != len(checked):
            raise InvalidValueError(f"tp_device_ids={checked} names a device twice; each rank needs its own")
        if len(checked) % self._pp_size:
            raise InvalidValueError(
                f"tp_device_ids={checked} names {len(checked)} devices, which can't be shared out evenly over "
                f"pp_size={self._pp_size} stages; name a multiple of {self._pp_size}"
            )
        self._tp_device_ids = FrozenList(checked)

    @property
    def tp_size(self) -> int:
        """The number of ranks in each stage."""
        return len(self._tp_device_ids) // self._pp_size

    @property
    def pp_size(self) -> int:
        """The number of pipeline stages."""
        return self._pp_size

    @property
    def num_ranks(self) -> int:
        """The number of ranks over all stages."""
        return len(self._tp_device_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistConfig) and repr(self) == repr(other)

    def __repr__(self) -> str:
        stages = f", pp_size={self._pp_size}" if self._pp_size > 1 else ""
        return f"DistConfig(tp_device_ids={self._tp_device_ids}{stages})"

    __hash__ = None  # type: ignore[assignment]  # it can be changed, so it must not be a key


def _check_size(name: str, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int):
        raise InvalidTypeError(f"{name}={size!r} must be an integer")
    if size < 1:
        raise InvalidValueError(f"{name}={size} must be 1 or more")
    return size
