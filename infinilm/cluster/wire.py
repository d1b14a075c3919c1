"""The messages between fronts and engine replicas, over a TCP connection that both ends have authenticated.

A front opens one connection to each replica and sends `Submit` and `Abort`. The replica first sends the state of its
cache, then the deltas of each step, and changes of its cache and load. Messages are msgpack frames, as between the HTTP
process and the engine's process: there is no pickle, and no client data goes through Ray.
"""

import asyncio
import hmac
import secrets
import sys
from array import array

import msgspec

from infinilm.engine.stats import EngineStats
from infinilm.framing import NONCE_BYTES, ChannelClosedError, prove
from infinilm.outputs import AnswerDelta
from infinilm.server.api_errors import ApiError
from infinilm.server.messages import CacheChanged, Ready, Stepped

__all__ = ["AnswerDelta", "CacheChanged", "Greeting", "Load", "Refused", "Report", "Stepped"]

HANDSHAKE_TIMEOUT_S = 2.0


class Greeting(msgspec.Struct, tag="greeting", array_like=True):
    """The replica's first message, and the first after its engine has restarted. It replaces earlier reports."""

    ready: Ready
    cache: bytes
    """Hashes of the blocks in its prefix cache, joined."""


class Load(msgspec.Struct, tag="load", array_like=True):
    """The replica's state, several times a second."""

    state: str
    """`State` of its engine, or "draining"."""
    cause: str | None
    queued_tokens: int
    num_requests: int
    num_restarts: int
    stats: EngineStats


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """A request was not accepted, or has failed."""

    request_id: str
    status: int
    message: str
    code: str | None
    headers: dict[str, str]

    @classmethod
    def from_error(cls, request_id: str, error: ApiError) -> "Refused":
        return cls(request_id, error.status, error.message, error.code, error.headers)

    def to_error(self) -> ApiError:
        return ApiError(self.status, self.message, code=self.code, headers=self.headers)


Report = Greeting | Load | Refused | Stepped | CacheChanged

decode_report = msgspec.msgpack.Decoder(Report).decode


def split_hashes(joined: bytes) -> "array[int]":
    """Hashes as integers, the same on every node."""
    found = array("Q", joined)
    if sys.byteorder == "big":
        found.byteswap()
    return found


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, is_front: bool) -> None:
    """Prove to the other end that this one knows the secret, and check that the other end knows it."""
    own, other = (b"front", b"replica") if is_front else (b"replica", b"front")
    nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(nonce)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            writer.write(prove(secret, own, await reader.readexactly(NONCE_BYTES)))
            answer = await reader.readexactly(NONCE_BYTES)
    except (asyncio.IncompleteReadError, OSError) as error:  # a timeout is an OSError
        raise ChannelClosedError("the other end did not prove that it belongs to this service") from error
    if not hmac.compare_digest(answer, prove(secret, other, nonce)):
        raise ChannelClosedError("the other end does not know this service's secret")
