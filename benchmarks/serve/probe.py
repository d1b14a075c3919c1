"""Checks, before the load, whether there is a server, which model it serves, and which fields it supports."""

import asyncio
import json
import os
from dataclasses import replace

from benchmarks.serve.client import Client, Plan
from benchmarks.serve.events import Trace, describe_error
from infinilm.errors import EngineError

PROBE_TIMEOUT = 120.0
MAX_NAMES = 5
PROBE_TOKENS = 4
OPTIONAL_FIELDS = {
    "ignore_eos": "answers may be shorter than asked for",
    "stream_options": "tokens are counted by events",
}
"""Fields that not every server supports, and the consequence of leaving them out."""
_HINTS = {
    401: "; give the key with --api-key",
    403: "; give the key with --api-key",
    404: "; give the address without /v1/…, and the name of a model that is served",
}


async def probe(plan: Plan, num_warm_up: int = 0) -> tuple[Plan, list[str]]:
    """Ask for the model's name and for one short answer, then for `num_warm_up` whole ones at once.

    Returns the plan to measure, and remarks about it.
    """
    client = Client(plan.endpoint, min(plan.timeout, PROBE_TIMEOUT))
    try:
        plan = replace(plan, work=replace(plan.work, model=await _find_model(client, plan)))
        plan, notes = await _find_fields(client, plan)
        traces = [Trace(-2 - number, 0.0) for number in range(num_warm_up)]
        await asyncio.gather(*(_send(client, plan, trace) for trace in traces))
    finally:
        client.close()
    return plan, notes


async def _find_model(client: Client, plan: Plan) -> str:
    try:
        reply = await client.get("/v1/models")
    except OSError as error:
        raise EngineError(f"no server at {plan.endpoint}: {_reason(error)}; start one with: infinilm serve") from None
    asked = plan.work.model
    if reply.status != 200:
        if asked and reply.status == 404:
            return asked  # not every server has a list
        raise _refusal(plan, "/v1/models", reply.status, describe_error(reply.body))
    try:
        names = [str(each["id"]) for each in json.loads(reply.body)["data"]]
    except (ValueError, TypeError, KeyError):
        raise EngineError(f"{plan.endpoint}/v1/models is not what OpenAI's API says: {reply.body[:80]!r}") from None
    if not names and not asked:
        raise EngineError(f"{plan.endpoint} serves no model; give one with --model")
    if asked and names and asked not in names:
        known = ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
        raise EngineError(f"{plan.endpoint} does not serve {asked!r}; it serves {known}")
    return asked or names[0]


def _reason(error: OSError) -> str:
    """Why there is no reply, without asyncio's additions."""
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return os.strerror(error.errno) if isinstance(error, ConnectionError) and error.errno else str(error)


async def _find_fields(client: Client, plan: Plan) -> tuple[Plan, list[str]]:
    """Remove the fields that the server does not support."""
    notes: list[str] = []
    while True:
        trace = Trace(-1, 0.0)
        await _send(client, plan, trace, max_tokens=min(plan.work.output_len, PROBE_TOKENS))
        if trace.error is None:
            return plan, notes
        fields = plan.work.fields
        unknown = next((name for name in OPTIONAL_FIELDS if name in fields and name in trace.message), None)
        if unknown is None or trace.error not in ("HTTP 400", "HTTP 422"):
            kind, _, status = trace.error.partition(" ")
            if kind == "HTTP":
                raise _refusal(plan, plan.work.path, int(status), trace.message)
            raise EngineError(f"{plan.endpoint}{plan.work.path}: {trace.error}: {trace.message}")
        notes.append(f"the server does not know {unknown}: {OPTIONAL_FIELDS[unknown]}")
        left = {name: value for name, value in fields.items() if name != unknown}
        plan = replace(plan, work=replace(plan.work, fields=left))


async def _send(client: Client, plan: Plan, trace: Trace, **fields: int) -> None:
    body = plan.work.body(trace.index) | fields
    await client.stream(plan.endpoint.request(plan.work.path, body), trace)


def _refusal(plan: Plan, path: str, status: int, message: str) -> EngineError:
    hint = _HINTS.get(status, "")
    if status == 400 and plan.work.texts is None and not plan.work.is_chat and "token" in message.lower():
        hint = f"; prompts are token ids below {plan.work.vocab_size} (--vocab-size)"
    return EngineError(f"{plan.endpoint}{path} answers HTTP {status}: {message}{hint}")
