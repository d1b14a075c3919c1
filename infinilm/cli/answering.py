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
    from infinilm.server.answer_parser import AnswerParser
    from infinilm.text.tokenizer import Tokenizer


LOCAL_FLAGS = 3
"""The index of the local flags in a terminal's attributes."""


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
    """Inside the block, the first Ctrl-C only sets `was_pressed`, so that no step is interrupted; a second one raises.

    The terminal does not show `^C`, which would appear in the middle of the answer.
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
    """The request's output each time it has changed; the last one is finished. Ctrl-C aborts the request."""
    outputs: list[RequestOutput] = []
    with CtrlC() as ctrl_c:
        request_id = engine.add_request(prompt, sampling, on_token=outputs.append)
        try:
            while not outputs or not outputs[-1].finished:
                outputs.clear()
                if ctrl_c.was_pressed:
                    engine.abort(request_id)
                engine.step_deltas()
                yield from outputs
        finally:
            engine.abort(request_id)


class AnswerSplitter:
    """Splits an answer into its reasoning, by the markers of the model's chat template, and the rest."""

    def __init__(self, tokenizer: "Tokenizer", prompt: Sequence[int], sampling: SamplingParams) -> None:
        from infinilm.server.harmony import make_parser
        from infinilm.text.answer import Answer
        from infinilm.text.reasoning import detect_reasoning, end_of_prompt

        self._parser: AnswerParser | None = None
        if (reasoning := detect_reasoning(tokenizer.chat_template)) is not None:
            is_open = end_of_prompt(tokenizer, prompt, reasoning) == "open"
            self._parser = make_parser(reasoning=reasoning, is_reasoning=is_open)
            kept_ids = tokenizer.special_tokens_in(reasoning.markers).values()
            self._answer = Answer(tokenizer, stops=sampling.stop, min_tokens=sampling.min_tokens, kept_ids=kept_ids)

    def split(self, output: RequestOutput) -> tuple[str, str]:
        """The reasoning and the other text that are new in `output`."""
        from infinilm.server.answer_events import add_up

        answer = output.outputs[0]
        if self._parser is None:
            return "", answer.new_text
        is_stop_string = isinstance(answer.stop_reason, str)
        text = self._answer.append(answer.new_token_ids, None if is_stop_string else answer.finish_reason)
        events = self._parser.feed(text) + (self._parser.finish() if output.finished else [])
        found = add_up(events)
        return found.reasoning, found.content
