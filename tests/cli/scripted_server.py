"""A server that says what a test tells it to say: real HTTP on a real port, in a thread of this process."""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

Step = float | bytes | asyncio.Event
"""Wait so many seconds, send this, or wait until something has happened."""

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
CUT = b""
"""As a step: close the connection."""


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def token(text: str = " t1", finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}], usage=None)


def usage(num_output: int, num_prompt: int = 5) -> bytes:
    return event(choices=[], usage={"prompt_tokens": num_prompt, "completion_tokens": num_output})


DONE = b"data: [DONE]\n\n"


COMPLETION = (token(), token(" data: x"), token(""), token('"finish_reason":null'), token("", "length"), usage(4), DONE)
CHAT = (
    event(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]),
    *[event(choices=[{"delta": {"content": text}, "finish_reason": None}]) for text in ("a", "\ndata: b", "c")],
    event(choices=[{"delta": {"content": "d"}, "finish_reason": "length"}]),
    b": a comment\n\n",
    usage(4),
    DONE,
)


def chunk(*content: bytes) -> bytes:
    joined = b"".join(content)
    return b"%x\r\n%b\r\n" % (len(joined), joined)


def whole(status: int, content: Any, headers: str = "") -> bytes:
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status} X\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def answer(num_tokens: int, delay: float = 0.0) -> list[Step]:
    """A plain answer: a token in each chunk, then the end and the usage."""
    tokens: list[Step] = [delay, chunk(token())] * num_tokens
    return [STREAM, *tokens, chunk(token("", "length"), usage(num_tokens), DONE), END]


@dataclass
class Asked:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    is_first: bool
    """On its connection."""


Script = Callable[[Asked], Iterable[Step]]


@dataclass
class ScriptedServer:
    """Answers each request for text with the steps that `script` makes for it, one by one as they are done."""

    script: Script
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    """For text, in order; the first one is the client's probe."""
    num_connections: int = 0
    models: bytes = whole(200, {"data": [{"id": "scripted"}, {"id": "other"}]})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            is_first = True
            while await self._answer_one(reader, writer, is_first):
                is_first = False
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_first: bool) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
        body = await reader.readexactly(int(headers["content-length"]))
        path = head[0].split()[1]
        if path.endswith("/v1/models"):
            writer.write(self.models)
            return True
        self.asked.append(Asked(path, headers, json.loads(body), is_first))
        for step in self.script(self.asked[-1]):
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif step == CUT:
                return False
            else:
                writer.write(step)
                await writer.drain()
        return True


@contextmanager
def scripted(script: Script, **settings: Any) -> Iterator[ScriptedServer]:
    """Run such a server."""
    server = ScriptedServer(script, **settings)
    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(server.serve, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    thread = Thread(target=loop.run_forever)
    thread.start()

    async def finish() -> None:
        listener.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        loop.stop()

    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(finish(), loop)
        thread.join()
        loop.close()
