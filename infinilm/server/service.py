"""The objects that the routes share: the engine's client, the tokenizer, admission control and metrics."""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from infinilm.config import Config
from infinilm.errors import InfinilmError, InvalidValueError
from infinilm.loading.gguf import GGUFFile
from infinilm.loading.sources import DEFAULT_MODEL, resolve
from infinilm.processes import ChildProcess
from infinilm.sampling_params import SamplingParams
from infinilm.server.admission import Admission
from infinilm.server.api_errors import ApiError, bad_request, shutting_down
from infinilm.server.engine_client import EngineClient
from infinilm.server.engine_request import DeltaQueue, EngineRequest
from infinilm.server.logs import request_id
from infinilm.server.messages import Ready
from infinilm.server.metrics import Metrics
from infinilm.server.protocol import SamplingFields, stop_strings
from infinilm.server.response_stream import ResponseStream
from infinilm.server.settings import ServerSettings
from infinilm.server.tool_formats import detect_format, supports_tools
from infinilm.text.answer import Answer
from infinilm.text.reasoning import detect_reasoning
from infinilm.text.tokenizer import Tokenizer

T = TypeVar("T")

NUM_THREADS = 2
MAX_INLINE_CHARS = 4096
"""Encoding a text of up to this length takes less time than handing it to a thread."""


class PromptEncoder:
    """Renders chat templates and encodes texts. Long work has threads and a time limit, so the event loop goes on."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        vocab_size: int,
        timeout: float,
        parse_special_tokens: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._parse_special_tokens = parse_special_tokens
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._timeout = timeout
        self._max_chars = max_tokens * tokenizer.max_token_chars
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompts")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        if not text:
            raise bad_request(f"{param} is empty; give at least one character", param)
        self._check_chars(text, param)
        work = partial(self.tokenizer.encode, text, add_special_tokens)
        token_ids = _refusing(work, param) if len(text) <= MAX_INLINE_CHARS else await self._run(work, param)
        return self.check_ids(token_ids, param)

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        """The tokens of a conversation up to the beginning of the answer. The chat template gets the `variables`.

        Special tokens in messages are text, unless the server's settings allow them.
        """
        work = partial(
            self.tokenizer.encode_chat,
            messages,
            parse_special_tokens=self._parse_special_tokens,
            check_text=partial(self._check_chars, param="messages"),
            **variables,
        )
        return self.check_ids(await self._run(work, "messages"), "messages")

    def check_ids(self, token_ids: list[int], param: str) -> list[int]:
        """Refuse a prompt that is empty, too long, or outside the vocabulary."""
        if not token_ids:
            raise bad_request(f"{param} has no tokens; give at least one", param)
        if len(token_ids) >= self._max_tokens:
            raise bad_request(
                f"{param} has {len(token_ids)} tokens; this model takes {self._max_tokens} with the answer, so at most "
                f"{self._max_tokens - 1} here",
                param,
                "context_length_exceeded",
            )
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            bad = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise bad_request(f"{param} has the token id {bad}; ids are 0 to {self._vocab_size - 1}", param)
        return token_ids

    def _check_chars(self, text: str, param: str) -> None:
        """Refuse, before any work, a text that is too long even if each of its tokens is the vocabulary's longest."""
        if len(text) > self._max_chars:
            raise bad_request(
                f"{param} has {len(text)} characters, which are more than {self._max_tokens} tokens",
                param,
                "context_length_exceeded",
            )

    async def _run(self, work: Callable[[], T], param: str) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(
                loop.run_in_executor(self._threads, partial(_refusing, work, param)), self._timeout
            )
        except TimeoutError:
            raise bad_request(f"{param} could not be made into tokens within {self._timeout:g} s", param) from None


def _refusing(work: Callable[[], T], param: str) -> T:
    """Run, and turn the package's errors into bad requests."""
    try:
        return work()
    except InfinilmError as error:
        raise bad_request(str(error), param) from error


class Service:
    """One served model. `start` loads it."""

    def __init__(
        self,
        config: Config,
        settings: ServerSettings,
        *,
        tool_call_parser: str | None = None,
        process: ChildProcess | None = None,
    ) -> None:
        """`process`: an engine process that is already started."""
        path = resolve(config.model)
        tokenizer = load_tokenizer(path)
        if tokenizer is None:
            raise InvalidValueError(f"{path} has no tokenizer, and the service speaks text; add its tokenizer.json")
        self.settings = settings
        self.limits = settings.limits
        self.model_name = settings.model_name or _name_of(config.model, path)
        self.tokenizer = tokenizer
        self.tool_format = detect_format(tokenizer.tool_template, tool_call_parser)
        self.template_takes_tools = {
            has_tools: supports_tools(template, self.tool_format)
            for has_tools, template in ((False, tokenizer.chat_template), (True, tokenizer.tool_template))
        }
        """Whether the chat template itself writes tools, calls and results, for requests without and with tools.

        The two may use different templates."""
        self.reasoning = detect_reasoning(tokenizer.chat_template, settings.reasoning_parser)
        self.tool_marker_ids = tokenizer.special_tokens_in(self.tool_format.markers)
        self.reasoning_marker_ids = tokenizer.special_tokens_in(self.reasoning.markers if self.reasoning else ())
        """The ids of special tokens in the markers, by text."""
        self.admission = Admission(settings.limits, has_tenants=len(settings.api_keys) > 1)
        self.client = EngineClient(config.replace(model=path), settings.limits, self.admission, process)
        self.metrics = Metrics()
        self.created = int(time.time())
        self._ids: Iterator[object] = itertools.count()
        self._prompts: PromptEncoder | None = None

    async def start(self) -> Ready:
        ready = await self.client.start()
        self._prompts = PromptEncoder(
            self.tokenizer,
            max_tokens=ready.max_model_len,
            vocab_size=ready.vocab_size,
            timeout=self.limits.prepare_timeout,
            parse_special_tokens=self.settings.parse_special_tokens,
        )
        return ready

    async def stop(self) -> None:
        await self.client.stop()
        if self._prompts is not None:
            self._prompts.close()

    async def drain(self) -> None:
        """Refuse new requests, and wait for the open ones up to `drain_timeout`."""
        self.client.is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.drain_timeout
        while self.admission.num_requests and loop.time() < deadline:
            await asyncio.sleep(0.05)
        self.client.fail_all(shutting_down())

    @property
    def prompts(self) -> PromptEncoder:
        if self._prompts is None:
            raise self.client.down_error()
        return self._prompts

    @property
    def ready(self) -> Ready:
        """The engine's report about the model, from its last start."""
        if self.client.ready is None:
            raise self.client.down_error()
        return self.client.ready

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and answer together."""
        return self.ready.max_model_len

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404, f"there is no model {name!r} here; use {self.model_name!r}", param="model", code="model_not_found"
            )

    def open_stream(
        self,
        request: Request,
        body: SamplingFields,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        kept_ids: Collection[int] = (),
    ) -> ResponseStream:
        """Make an engine request for each prompt. Special tokens among `kept_ids` stay in the answers' text."""
        user = f" of {body.user!r}" if body.user else ""
        log_as = f"{request.url.path}{user}" if self.settings.log_requests else None
        output = DeltaQueue()
        requests: list[EngineRequest] = []
        answers: list[Answer] = []
        for token_ids, each in zip(prompts, params, strict=True):
            first_answer = len(answers)
            requests.append(
                EngineRequest(
                    request_id=f"{next(self._ids)}-{request_id.get()}",  # the engine logs it too
                    prompt_token_ids=list(token_ids),
                    params=each,
                    output=output,
                    tenant=request.scope.get("tenant", ""),
                    arrival_time=request.scope["arrival_time"],
                    session=request.headers.get("x-session-id", ""),
                    first_answer=first_answer,
                )
            )
            answers += [
                Answer(
                    self.tokenizer,
                    first_answer + index,
                    stops=stop_strings(body),
                    min_tokens=each.min_tokens,
                    kept_ids=kept_ids,
                )
                for index in range(each.n)
            ]
        return ResponseStream(
            self.client, self.metrics, requests=requests, answers=answers, output=output, log_as=log_as
        )


def load_tokenizer(path: Path) -> Tokenizer | None:
    """A checkpoint's tokenizer, loaded without torch, which the HTTP process does not need."""
    if path.is_dir():
        return Tokenizer.from_directory(path)
    with closing(GGUFFile(path)) as file:
        return Tokenizer.from_gguf(file.metadata)


def _name_of(model: str | Path | None, path: Path) -> str:
    """The name of a model in requests: the given name, or its file's name if that is a path."""
    name = DEFAULT_MODEL if model is None else str(model)
    return path.name if Path(name).exists() else name
