"""Opens an engine and streams one answer that Ctrl-C can stop."""

import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Self

from infinilm.config import Config
from infinilm.errors import InvalidValueError
from infinilm.outputs import RequestOutput
from infinilm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from infinilm import LLM


LOCAL_FLAGS = 3
"""Their index in a terminal's attributes."""


def open_engine(config: Config) -> "LLM":
    """Load the model. A model that can't be found is reported before torch is imported."""
    from infinilm.loading.sources import resolve

    path = resolve(config.model)
    from infinilm import LLM

    return LLM(config.replace(model=path))


def require_extra(extra: str, what: str, *modules: str) -> None:
    """Refuse a command that lacks packages of an extra, before a model is fetched or loaded for it."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise InvalidValueError(f"{what} needs {missing[0]}; install it with: pip install 'infinilm[{extra}]'")


class CtrlC:
    """Inside it the first Ctrl-C only sets `was_pressed`, so that no step is interrupted; a second one raises.

    A terminal does not show it as `^C`, which would stand in the middle of the answer.
    """

    def __init__(self) -> None:
        self.was_pressed = False
        self._terminal = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None

    def __enter__(self) -> Self:
        self._outer_handler = signal.signal(signal.SIGINT, self._press)
        if self._terminal is not None:
            local_flags = self._terminal[LOCAL_FLAGS] & ~termios.ECHOCTL
            changed = [*self._terminal[:LOCAL_FLAGS], local_flags, *self._terminal[LOCAL_FLAGS + 1 :]]
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, changed)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._outer_handler)
        if self._terminal is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._terminal)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.was_pressed:
            signal.default_int_handler(number, frame)
        self.was_pressed = True


def stream_answer(engine: "LLM", prompt: str | Sequence[int], sampling: SamplingParams) -> Iterator[RequestOutput]:
    """The request's output after each step that changed it; the last one is finished. Ctrl-C aborts the request."""
    with CtrlC() as ctrl_c:
        request_id = engine.add_request(prompt, sampling)
        try:
            while True:
                if ctrl_c.was_pressed:
                    engine.abort(request_id)
                for output in engine.step():
                    if output.request_id == request_id:
                        yield output
                        if output.finished:
                            return
        finally:
            engine.abort(request_id)
