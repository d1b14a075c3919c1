"""All that the routes use: the engine, the tokenizer, who gets in, what is counted."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path

from starlette.requests import Request

from infinilm.config import Config
from infinilm.errors import InvalidValueError
from infinilm.loading.gguf import GGUFFile
from infinilm.loading.sources import DEFAULT_MODEL, resolve
from infinilm.sampling_params import SamplingParams
from infinilm.server.admission import Admission
from infinilm.server.answers import Answer
from infinilm.server.api_errors import ApiError, shutting_down
from infinilm.server.calls import Call
from infinilm.server.engine_client import EngineClient
from infinilm.server.jobs import Inbox, Job
from infinilm.server.logs import request_id
from infinilm.server.messages import Ready
from infinilm.server.metrics import Metrics
from infinilm.server.prompts import PromptMaker
from infinilm.server.protocol import SamplingFields
from infinilm.server.sampling import stop_strings
from infinilm.server.settings import ServerSettings
from infinilm.server.tools import detect_format, supports_tools
from infinilm.text.tokenizer import Tokenizer


class Service:
    """One served model. `start` loads it."""

    def __init__(self, config: Config, settings: ServerSettings, *, tool_call_parser: str | None = None) -> None:
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
        """Whether the chat template itself writes tools, calls and results; a request with tools may have its own."""
        self.client = EngineClient(config.replace(model=path), settings.limits)
        self.admission = Admission(self.client, settings.limits, has_tenants=len(settings.api_keys) > 1)
        self.metrics = Metrics()
        self.created = int(time.time())
        self._ids = itertools.count()
        self._prompts: PromptMaker | None = None

    async def start(self) -> Ready:
        """Load the model; returns what is known of it."""
        ready = await self.client.start()
        self._prompts = PromptMaker(
            self.tokenizer,
            max_tokens=ready.max_model_len,
            vocab_size=ready.vocab_size,
            timeout=self.limits.prepare_timeout,
            parse_special_tokens=self.settings.parse_special_tokens,
        )
        return ready

    async def stop(self) -> None:
        """End the engine."""
        await self.client.stop()
        if self._prompts is not None:
            self._prompts.close()

    async def drain(self) -> None:
        """Let nobody in any more, and wait for those within, for a while."""
        self.admission.is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.drain_timeout
        while self.admission.num_jobs and loop.time() < deadline:
            await asyncio.sleep(0.05)
        self.admission.fail_all(shutting_down())

    @property
    def prompts(self) -> PromptMaker:
        """Makes token ids."""
        if self._prompts is None:
            raise self.client.down_error()
        return self._prompts

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        if self.client.ready is None:
            raise self.client.down_error()
        return self.client.ready.max_model_len

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not here."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404, f"there is no model {name!r} here; use {self.model_name!r}", param="model", code="model_not_found"
            )

    def open_call(
        self,
        request: Request,
        body: SamplingFields,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        kept_ids: Collection[int] = (),
    ) -> Call:
        """A call with a job for each prompt; special tokens among `kept_ids` stay in the answers' text."""
        user = f" of {body.user!r}" if body.user else ""
        log_as = f"{request.url.path}{user}" if self.settings.log_requests else None
        inbox = Inbox()
        jobs: list[Job] = []
        answers: list[Answer] = []
        for token_ids, each in zip(prompts, params, strict=True):
            job = Job(
                request_id=f"{next(self._ids)}-{request_id.get()}",  # the engine logs it too
                prompt_token_ids=list(token_ids),
                params=each,
                inbox=inbox,
                tenant=request.scope.get("tenant", ""),
                arrival_time=request.scope["arrival_time"],
                first_answer=len(answers),
            )
            jobs.append(job)
            answers += [
                Answer(
                    job.first_answer + index,
                    self.tokenizer,
                    stops=stop_strings(body),
                    min_tokens=each.min_tokens,
                    kept_ids=kept_ids,
                )
                for index in range(each.n)
            ]
        return Call(self.admission, self.metrics, jobs=jobs, answers=answers, inbox=inbox, log_as=log_as)


def load_tokenizer(path: Path) -> Tokenizer | None:
    """A checkpoint's tokenizer, without what reading weights takes: the HTTP process needs no torch."""
    if path.is_dir():
        return Tokenizer.from_directory(path)
    with closing(GGUFFile(path)) as file:
        return Tokenizer.from_gguf(file.metadata)


def make_id(prefix: str) -> str:
    """A new id for a reply."""
    return f"{prefix}-{secrets.token_hex(12)}"


def _name_of(model: str | Path | None, path: Path) -> str:
    """What a model is called by those who ask for it: as it was asked for here, or as its file."""
    name = DEFAULT_MODEL if model is None else str(model)
    return path.name if Path(name).exists() else name
