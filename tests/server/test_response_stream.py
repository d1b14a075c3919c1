"""Answers that end at a stop string, which the HTTP process finds, while the engine goes on and fails."""

import asyncio
from typing import Any, cast

import pytest
from tiny_tokenizer import save_tokenizer

from infinilm import SamplingParams
from infinilm.outputs import AnswerDelta, FinishReason, RequestMetrics
from infinilm.server.api_errors import ApiError
from infinilm.server.engine_client import EngineClient
from infinilm.server.engine_request import DeltaQueue, EngineRequest
from infinilm.server.metrics import Metrics
from infinilm.server.response_stream import ResponseStream
from infinilm.text.answer import Answer
from infinilm.text.tokenizer import Tokenizer

Delta = tuple[int, str, FinishReason | None]
"""Answer, text, and how it ends."""
ERROR = "EngineError: no token can be drawn"


class FakeClient:
    """Notes which answers are cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[int | None] = []

    def enter(self, requests: list[EngineRequest]) -> None: ...

    def cancel(self, _request: EngineRequest, answer: int | None = None) -> None:
        self.cancelled.append(answer)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    found = Tokenizer.from_directory(directory)
    assert found is not None
    return found


async def read(tokenizer: Tokenizer, *deltas: Delta) -> tuple[list[Answer], list[int | None]]:
    """Two answers of a request that stops at `!`, made of deltas."""

    async def wait_forever() -> Any:
        await asyncio.Event().wait()

    client, output = FakeClient(), DeltaQueue()
    request = EngineRequest("r", [2], SamplingParams(n=2), output, "", 0.0)
    answers = [Answer(tokenizer, index, stops=["!"]) for index in range(2)]
    stream = ResponseStream(cast(EngineClient, client), Metrics(), requests=[request], answers=answers, output=output)
    for index, text, end in deltas:
        error = ERROR if end is not None else None  # an answer that ends otherwise has its request's error, too
        ids = tokenizer.encode(text)
        request.append_delta(AnswerDelta("r", index, ids, None, end, None, None, error, RequestMetrics()), 1.0)
    request.is_ended = request.num_open == 0
    try:
        await stream.begin(wait_forever, timeout=None, max_timeout=10)
        while not stream.is_over:
            await stream.read_chunks()
    finally:
        stream.close()
    return answers, client.cancelled


@pytest.mark.parametrize(
    "deltas",
    [
        [(0, "a!", None), (0, "", "abort")],
        [(0, "a!", None), (0, "bc", "abort")],
        [(0, "a!bc", "abort")],  # several steps in one report
    ],
)
def test_an_error_behind_a_stop_string_is_none(tokenizer: Tokenizer, deltas: list[Delta]) -> None:
    answers, _ = asyncio.run(read(tokenizer, *deltas, (1, "de", None), (1, "f", "length")))
    assert [(each.text, each.finish_reason) for each in answers] == [("a", "stop"), ("def", "length")]


@pytest.mark.parametrize(
    "deltas", [[(0, "", "abort")], [(0, "a", "abort")], [(0, "a", None), (0, "", "abort")], [(0, "ab", "abort")]]
)
def test_an_error_before_it_ends_the_request(tokenizer: Tokenizer, deltas: list[Delta]) -> None:
    with pytest.raises(ApiError, match=ERROR) as found:
        asyncio.run(read(tokenizer, *deltas, (1, "x!", None), (1, "", "abort")))
    assert (found.value.status, found.value.code) == (500, "engine_error")
