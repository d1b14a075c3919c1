"""`POST /v1/completions`."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infinilm.sampling_params import SamplingParams
from infinilm.server.api_errors import bad_request
from infinilm.server.protocol import CompletionRequest, check_limits, check_size, find_structure, make_params
from infinilm.server.replies import CompletionLogprobs, Reply, encode, join_lists, respond
from infinilm.server.response_stream import Chunk, ResponseStream
from infinilm.server.service import Service
from infinilm.text.answer import Answer

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    _check(service, body)
    prompts = await _encode_prompts(service, body)
    params = [_params(service, body, len(token_ids)) for token_ids in prompts]
    stream = service.open_stream(request, body, prompts, params)
    return await respond(service, body, request, stream, CompletionReply(service, body, stream))


def _check(service: Service, body: CompletionRequest) -> None:
    service.check_model(body.model)
    service.client.check_open()
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
        # With max_tokens=0 one token is drawn and dropped: the engine has no other way to score a prompt.
        min(max(asked, 1), service.max_model_len - num_prompt_tokens),
        service.ready.default_params,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        structured=find_structure(body),
    )


class CompletionReply(Reply):
    content_key = "text"
    no_content = ""

    def __init__(self, service: Service, body: CompletionRequest, stream: ResponseStream) -> None:
        super().__init__(service, body, stream, prefix="cmpl", kind="text_completion", text_key='"text":')
        self._requests = [request for request in stream.requests for _ in range(request.params.n)]
        """The engine request of each answer."""
        self._wants_logprobs = body.logprobs is not None
        self._is_echo = bool(body.echo)
        self._drops_text = body.max_tokens == 0
        self._prompts = self._prompt_texts(body) if self._is_echo else []
        self._lists = [CompletionLogprobs(service.tokenizer) for _ in stream.answers]
        self._parts: list[list[dict[str, Any]]] = [[] for _ in stream.answers]
        self._held: list[Chunk] = []

    def _prompt_texts(self, body: CompletionRequest) -> list[str]:
        if isinstance(body.prompt, str):
            return [body.prompt]
        if isinstance(body.prompt[0], str):
            return [str(text) for text in body.prompt]
        requests = self._stream.requests
        return [self._tokenizer.decode(each.prompt_token_ids, skip_special_tokens=False) for each in requests]

    def _echo(self, answer: Answer) -> str:
        """The prompt, before the first text of an answer; otherwise nothing."""
        if self._is_begun[answer.index] or not self._is_echo:
            return ""
        self._is_begun[answer.index] = True
        return self._prompts[self._stream.requests.index(self._requests[answer.index])]

    def _finish_reason(self, answer: Answer) -> str | None:
        return "length" if self._drops_text else answer.finish_reason

    def _ready(self, chunks: list[Chunk]) -> list[Chunk]:
        """Hold back chunks until their prompt's log-probabilities, which must be sent first, are known."""
        if not (self._is_echo and self._wants_logprobs):
            return chunks
        chunks = self._held + chunks
        self._held = [each for each in chunks if self._requests[each.answer.index].prompt_logprobs is None]
        return [each for each in chunks if self._requests[each.answer.index].prompt_logprobs is not None]

    def _new_logprobs(self, chunk: Chunk, *, is_first: bool) -> dict[str, Any]:
        """The log-probabilities of the chunk's tokens; before those of the first chunk, the echoed prompt's."""
        lists, request = self._lists[chunk.answer.index], self._requests[chunk.answer.index]
        parts = []
        if is_first and request.prompt_logprobs:
            parts.append(lists.describe_next(request.prompt_logprobs, request.prompt_token_ids))
        new = [] if self._drops_text else chunk.delta.logprobs or []
        return join_lists([*parts, lists.describe_next(new, [each.token_id for each in new])])

    def keep(self, chunks: list[Chunk]) -> None:
        if self._wants_logprobs:
            for each in self._ready(chunks):
                parts = self._parts[each.answer.index]
                parts.append(self._new_logprobs(each, is_first=not parts))

    def whole(self) -> dict[str, Any]:
        self.keep([])
        return super().whole()

    def _whole_choice(self, answer: Answer) -> dict[str, Any]:
        text = self._echo(answer) + ("" if self._drops_text else answer.text)
        logprobs = join_lists(self._parts[answer.index]) if self._wants_logprobs else None
        return self._choice(answer, text, logprobs, is_end=True)

    def write(self, chunks: list[Chunk]) -> bytes:
        written: list[bytes] = []
        for each in self._ready(chunks):
            answer = each.answer
            is_first = not self._is_begun[answer.index]
            text = self._echo(answer) + ("" if self._drops_text else each.text)
            if self._wants_logprobs:
                lists = self._new_logprobs(each, is_first=is_first)
                if text or lists["tokens"]:
                    written.append(self._event(self._choice(answer, text, lists)))
            elif text:
                before, after = self._templates[answer.index]
                written += (before, encode(text), after)
            if each.is_end:
                self._write_end(written, answer)
        return b"".join(written)

    def end(self) -> bytes:
        return self.write([]) + super().end()
