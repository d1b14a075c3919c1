"""`POST /v1/completions`."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infinilm.sampling_params import SamplingParams
from infinilm.server.answers import Answer
from infinilm.server.api_errors import bad_request
from infinilm.server.calls import Call, News
from infinilm.server.events import EventMaker, encode
from infinilm.server.logprobs import CompletionLogprobs, join_lists
from infinilm.server.protocol import CompletionRequest
from infinilm.server.replies import respond
from infinilm.server.sampling import check_limits, check_size, make_params
from infinilm.server.service import Service, make_id
from infinilm.server.structure import find_structure

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Answer a request."""
    _check(service, body)
    prompts = await _encode_prompts(service, body)
    params = [_params(service, body, len(token_ids)) for token_ids in prompts]
    call = service.open_call(request, body, prompts, params)
    reply = CompletionReply(service, body, call)
    return await respond(service, body, request, call, reply)


def _check(service: Service, body: CompletionRequest) -> None:
    service.check_model(body.model)
    service.admission.check_open()
    check_limits(body, service.limits)
    check_size("logprobs", body.logprobs or 0, "max_logprobs", service.limits)
    if body.suffix:
        raise bad_request("suffix is not supported: this server completes at the end only", "suffix", "unsupported")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of is not supported; use n, and choose among the answers", "best_of", "unsupported")
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens=0 leaves nothing to answer; it is for echo with logprobs", "max_tokens")


async def _encode_prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await service.prompts.encode(prompt)]
    if not prompt:
        raise bad_request("prompt is empty; give a text or token ids", "prompt")
    if isinstance(prompt[0], int):
        return [service.prompts.check_ids(prompt, "prompt")]
    check_size("prompt", len(prompt), "max_prompts", service.limits)
    return [
        await service.prompts.encode(each) if isinstance(each, str) else service.prompts.check_ids(each, "prompt")
        for each in prompt
    ]


def _params(service: Service, body: CompletionRequest, num_prompt_tokens: int) -> SamplingParams:
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return make_params(
        body,
        # For none at all one is drawn, and dropped: the engine has no other way to score a prompt.
        min(max(asked, 1), service.max_model_len - num_prompt_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        structured=find_structure(body),
    )


class CompletionReply:
    """Makes the reply, whole or as events."""

    def __init__(self, service: Service, body: CompletionRequest, call: Call) -> None:
        self._tokenizer = service.tokenizer
        self._call = call
        self._jobs = [job for job in call.jobs for _ in range(job.params.n)]
        """Of each answer."""
        self._wants_logprobs = body.logprobs is not None
        self._is_echo = bool(body.echo)
        self._drops_text = body.max_tokens == 0
        self._prompts = self._find_prompts(body)
        self._base = {
            "id": make_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        has_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._events = EventMaker(self._base, call, has_usage=has_usage)
        self._templates = [self._events.template('"text":', answer.index) for answer in call.answers]
        self._lists = [CompletionLogprobs(service.tokenizer) for _ in call.answers]
        self._parts: list[list[dict[str, Any]]] = [[] for _ in call.answers]
        self._is_begun = [False] * len(call.answers)
        self._held: list[News] = []
        self._last: Answer | None = None

    def _find_prompts(self, body: CompletionRequest) -> list[str]:
        """The text of each job's prompt, if it is to be repeated."""
        if not self._is_echo:
            return []
        if isinstance(body.prompt, str):
            return [body.prompt]
        if isinstance(body.prompt[0], str):
            return [str(text) for text in body.prompt]
        return [self._tokenizer.decode(job.prompt_token_ids, skip_special_tokens=False) for job in self._call.jobs]

    def _echo(self, answer: Answer) -> str:
        """The prompt, before the first of an answer; otherwise nothing."""
        if self._is_begun[answer.index] or not self._is_echo:
            return ""
        self._is_begun[answer.index] = True
        return self._prompts[self._call.jobs.index(self._jobs[answer.index])]

    def _finish_reason(self, answer: Answer) -> str | None:
        return "length" if self._drops_text else answer.finish_reason

    def _ready(self, news: list[News]) -> list[News]:
        """What can be reported: the prompt's log-probabilities come before the answer's, but may be known later."""
        if not (self._is_echo and self._wants_logprobs):
            return news
        news = self._held + news
        self._held = [each for each in news if self._jobs[each.answer.index].prompt_logprobs is None]
        return [each for each in news if self._jobs[each.answer.index].prompt_logprobs is not None]

    def _new_logprobs(self, news: News, *, is_first: bool) -> dict[str, Any]:
        """Of the tokens that came, and of the prompt's if it is repeated here."""
        lists, job = self._lists[news.answer.index], self._jobs[news.answer.index]
        parts = [lists.take(job.prompt_logprobs, job.prompt_token_ids)] if is_first and job.prompt_logprobs else []
        new = [] if self._drops_text else news.delta.logprobs or []
        return join_lists([*parts, lists.take(new, [each.token_id for each in new])])

    # --- whole ------------------------------------------------------------------------------------------

    def keep(self, news: list[News]) -> None:
        """Take in news; the text is kept by the answers."""
        if self._wants_logprobs:
            for each in self._ready(news):
                parts = self._parts[each.answer.index]
                parts.append(self._new_logprobs(each, is_first=not parts))

    def whole(self) -> dict[str, Any]:
        """The reply."""
        self.keep([])
        choices = [
            {
                "index": answer.index,
                "text": self._echo(answer) + ("" if self._drops_text else answer.text),
                "logprobs": join_lists(self._parts[answer.index]) if self._wants_logprobs else None,
                "finish_reason": self._finish_reason(answer),
                "stop_reason": answer.stop_reason,
            }
            for answer in self._call.answers
        ]
        return {**self._base, "choices": choices, "usage": self._call.usage(), "timings": self._call.timings()}

    # --- as events --------------------------------------------------------------------------------------

    def write(self, news: list[News]) -> bytes:
        """The events for what has come."""
        written: list[bytes] = []
        for each in self._ready(news):
            answer = each.answer
            is_first = not self._is_begun[answer.index]
            text = self._echo(answer) + ("" if self._drops_text else each.text)
            if self._wants_logprobs:
                lists = self._new_logprobs(each, is_first=is_first)
                if text or lists["tokens"]:
                    written.append(self._events.make(self._choice(answer, text, lists)))
            elif text:
                before, after = self._templates[answer.index]
                written += (before, encode(text), after)
            if each.is_end:
                if self._events.count_done():
                    self._last = answer
                else:
                    written.append(self._events.make(self._choice(answer, "", is_end=True)))
        return b"".join(written)

    def end(self) -> bytes:
        """What was held back, and the end of the answer that was done last."""
        held = self.write([])
        assert self._last is not None
        return held + self._events.end(self._choice(self._last, "", is_end=True))

    def _choice(
        self, answer: Answer, text: str, logprobs: dict[str, Any] | None = None, *, is_end: bool = False
    ) -> dict[str, Any]:
        choice = {"index": answer.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if is_end:
            choice |= {"finish_reason": self._finish_reason(answer), "stop_reason": answer.stop_reason}
        return choice
