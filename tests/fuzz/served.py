"""Cases through a real server: each request is an HTTP request of its own, all at once; some readers hang up."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
from server_driver import Server, wait_until

from fuzz.cases import Arrival, Case
from fuzz.compare import UNKNOWN, Outcome, SeenAnswer
from fuzz.session import Record
from fuzz.specs import VOCAB_SIZE, RequestSpec
from infinilm.outputs import TokenLogprobs
from infinilm.text.tokenizer import Tokenizer

KEYS = ("fuzz-key-one", "fuzz-key-two")
"""Clients with different keys share no blocks."""
MAX_AGE_S = 100
"""The driver kills a server that runs much longer."""
TIME_LIMIT_S = 20


class Servers:
    """Starts servers when they are needed: one for each kind of engine."""

    def __init__(self, model: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
        self._model = model
        self._settings = settings
        self.tokenizer = tokenizer
        self._running: dict[Any, tuple[Server, float]] = {}

    def get(self, case: Case) -> Server:
        server, start_time = self._running.get(case.engine, (None, 0.0))
        if server is not None and monotonic() - start_time > MAX_AGE_S:
            server.stop()
            server = None
        if server is None:
            settings = {**case.engine.kwargs(), **self._settings}
            assert settings.pop("enable_prefix_caching")  # the default
            if settings["device"] != "cpu":
                settings["attention_backend"] = "auto"
            options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
            server = Server(self._model, *options, key=KEYS[0], INFINILM_API_KEY=" ".join(KEYS))
            self._running[case.engine] = server, monotonic()
        return server

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token ids by the texts that a reply shows for them."""
        ids = {self.tokenizer.token(token_id): token_id for token_id in range(VOCAB_SIZE)}
        assert len(ids) == VOCAB_SIZE
        return ids

    def close(self) -> None:
        for server, _ in self._running.values():
            server.stop()
        self._running.clear()


def run_served(case: Case, servers: Servers) -> tuple[list[Outcome], list[str]]:
    """What came of each request, and what was wrong on the way."""
    server = servers.get(case)
    engine_pid = server.engine_pid
    outcomes, problems = asyncio.run(_run(case, server, servers))
    try:
        wait_until(server.is_empty)
    except AssertionError:
        problems.append(f"the server is not empty: {server.metrics()}")
    if server.engine_pid != engine_pid:
        problems.append("the engine was replaced")
    return outcomes, problems


async def _run(case: Case, server: Server, servers: Servers) -> tuple[list[Outcome], list[str]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=TIME_LIMIT_S) as client:
        readers = [Reader(case, arrival, client, servers) for arrival in case.arrivals]
        results = await asyncio.gather(*(reader.run() for reader in readers), return_exceptions=True)
    problems = [
        f"{reader.outcome.name}: {type(result).__name__}: {result}"
        for reader, result in zip(readers, results, strict=True)
        if isinstance(result, BaseException)
    ]
    return [reader.outcome for reader in readers], problems


class Reader:
    """Sends one request and reads its reply, whole or as events, or a part of it."""

    def __init__(self, case: Case, arrival: Arrival, client: httpx.AsyncClient, servers: Servers) -> None:
        self._arrival = arrival
        self._client = client
        self._servers = servers
        self._leave_after = _leave_after(case, arrival)
        self._body = _body(arrival.spec)
        self.outcome = Record(arrival).outcome
        self.outcome.error = UNKNOWN
        self.outcome.answers = [SeenAnswer(UNKNOWN, "", UNKNOWN, None, None) for _ in range(arrival.spec.num_answers)]
        self._lists: list[list[dict[str, Any]]] = [[] for _ in self.outcome.answers]

    async def run(self) -> None:
        await asyncio.sleep(0.002 * self._arrival.tick)
        headers = {"Authorization": f"Bearer {KEYS[self._arrival.cache_salt == 'two']}"}
        if self._arrival.entry == "stream":
            async with self._client.stream(
                "POST", "/v1/completions", json=self._body | {"stream": True} | _USAGE, headers=headers
            ) as response:
                await self._read_events(response)
        else:
            asking = self._client.post("/v1/completions", json=self._body, headers=headers)
            limit = None if self._leave_after is None else 0.004 * self._leave_after
            try:
                response = await asyncio.wait_for(asking, limit)
            except TimeoutError:
                self.outcome.was_left = True
            else:
                self._take(response.json())
        self._finish()

    async def _read_events(self, response: httpx.Response) -> None:
        if response.status_code != 200:
            self._take(json.loads(await response.aread()))
            return
        num_events = 0
        async for event in _events(response):
            self._take(event)
            num_events += 1
            if self.outcome.reply_error is not None:
                return
            if num_events == self._leave_after:
                self.outcome.was_left = True
                return

    def _take(self, reply: dict[str, Any]) -> None:
        if "error" in reply:
            self.outcome.reply_error = reply["error"]["message"]
            self.outcome.was_left = True
            return
        for choice in reply["choices"]:
            seen = self.outcome.answers[choice["index"]]
            assert seen.finish_reason is None, f"answer {choice['index']} goes on after its end"
            seen.text += choice["text"]
            seen.finish_reason, seen.stop_reason = choice["finish_reason"], choice.get("stop_reason")
            if choice["logprobs"] is not None:
                self._lists[choice["index"]].append(choice["logprobs"])
        if reply.get("usage"):
            self.outcome.num_tokens = reply["usage"]["completion_tokens"]

    def _finish(self) -> None:
        """Take the prompt off the answers, and turn the lists of log-probabilities into the engine's form."""
        outcome, body = self.outcome, self._body
        tokenizer = self._servers.tokenizer
        prompt, num_prompt_tokens = "", 0
        if "echo" in body:
            ids = body["prompt"] if isinstance(body["prompt"], list) else tokenizer.encode(body["prompt"])
            num_prompt_tokens = len(ids)
            is_text = isinstance(body["prompt"], str)
            prompt = body["prompt"] if is_text else tokenizer.decode(ids, skip_special_tokens=False)
        outcome.prompt_logprobs = UNKNOWN
        for index, seen in enumerate(outcome.answers):
            if seen.text or not outcome.was_left:
                assert seen.text.startswith(prompt), f"{seen.text!r} does not begin with the prompt {prompt!r}"
                seen.text = seen.text.removeprefix(prompt)
            if "logprobs" in body and (self._lists[index] or not outcome.was_left):
                found = self._positions(self._lists[index], body["logprobs"])
                if num_prompt_tokens:
                    outcome.prompt_logprobs = [each and _bare(each) for each in found[:num_prompt_tokens]]
                seen.logprobs = found[num_prompt_tokens:]
                seen.token_ids = [each.token_id for each in seen.logprobs]

    def _positions(self, parts: list[dict[str, Any]], num_top: int) -> list[Any]:
        ids = self._servers.ids
        return [
            logprob
            if logprob is None
            else TokenLogprobs(ids[token], logprob, UNKNOWN, {ids[t]: v for t, v in list(top.items())[:num_top]})
            for part in parts
            for token, logprob, top in zip(part["tokens"], part["token_logprobs"], part["top_logprobs"], strict=True)
        ]


_USAGE = {"stream_options": {"include_usage": True}}


def _bare(position: TokenLogprobs) -> TokenLogprobs:
    """Without the most likely ones, of which a reply has another number than the lone run."""
    return TokenLogprobs(position.token_id, position.logprob, UNKNOWN, UNKNOWN)


def _leave_after(case: Case, arrival: Arrival) -> int | None:
    """After how many events the reader hangs up."""
    found = [abort.tick - arrival.tick + 1 for abort in case.aborts if abort.target == arrival.name]
    if arrival.callback and arrival.callback.action in ("raise", "abort_self"):
        found.append(arrival.callback.at_call)
    return min(found, default=None)


def _body(spec: RequestSpec) -> dict[str, Any]:
    body = {"prompt": spec.engine_prompt, **spec.settings}
    if form := body.pop("structured", None):
        value = getattr(form, form.kind)
        body["guided_json" if form.kind == "json_schema" else f"guided_{form.kind}"] = value
    if bias := body.pop("logit_bias", None):
        body["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
    if body.pop("prompt_logprobs", None) is not None and "logprobs" in body:
        body["echo"] = True
    return body


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has no end")
