"""A row that kills the engine becomes an error row, and costs the others only time."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from infinilm.batch.answering import Answer, RowAnswerer, RowOptions, answer_all
from infinilm.batch.rows import Row
from infinilm.errors import WorkerDiedError
from infinilm.server.direct import DirectReply

NUM_AT_WORK = 40
POISON = {"prompt": "poison"}


class FakeService:
    """Answers after some steps; dies with all that is open when a poisonous request is at work."""

    def __init__(self) -> None:
        self.num_deaths = 0
        self.num_open = self.max_open = 0
        self._death = asyncio.Event()

    async def wait_ready(self) -> None:
        await asyncio.sleep(0)

    async def post(self, path: str, body: bytes, /) -> DirectReply:
        death = self._death
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            for _ in range(5):
                await asyncio.sleep(0)
                if death.is_set():
                    return DirectReply(500, "r", b'{"error":{"message":"the engine died","code":"engine_died"}}')
            if "poison" in json.loads(body)["prompt"]:
                self.num_deaths += 1
                self._death = asyncio.Event()
                death.set()
                return DirectReply(500, "r", b'{"error":{"message":"the engine died","code":"engine_died"}}')
            return DirectReply(200, "r", b'{"usage":{"completion_tokens":3}}')
        finally:
            self.num_open -= 1


def answer_rows(service: FakeService, rows: Iterator[Row]) -> list[Answer]:
    answers: list[Answer] = []

    async def answer() -> None:
        await answer_all(RowAnswerer(service, RowOptions()), rows, NUM_AT_WORK, answers.append)

    asyncio.run(asyncio.wait_for(answer(), 60))
    return sorted(answers, key=lambda answer: answer.row)


@pytest.mark.parametrize("poisonous", [(), (0,), (150,), (299,), (10, 20, 200), (100, 101, 102, 103)])
def test_only_the_rows_that_kill_the_engine_become_errors(poisonous: tuple[int, ...]) -> None:
    service = FakeService()
    rows = (Row(n, n + 1, POISON if n in poisonous else {"prompt": "x"}) for n in range(300))
    answers = answer_rows(service, rows)
    assert [answer.row for answer in answers] == [*range(300)]
    assert [answer.row for answer in answers if answer.error] == [*poisonous]
    assert service.num_deaths <= 6 * len(poisonous)
    assert service.max_open == NUM_AT_WORK


def test_rows_are_read_only_as_others_are_done() -> None:
    service = FakeService()
    num_read = 0

    def rows() -> Iterator[Row]:
        nonlocal num_read
        for number in range(200):
            num_read += 1
            assert num_read <= len(answers) + NUM_AT_WORK + 1
            yield Row(number, number + 1, {"prompt": "x"})

    answers: list[Answer] = []
    asyncio.run(answer_all(RowAnswerer(service, RowOptions()), rows(), NUM_AT_WORK, answers.append))
    assert len(answers) == 200


def test_an_engine_that_cannot_be_started_again_stops_the_job() -> None:
    class Broken(FakeService):
        async def wait_ready(self) -> Any:
            raise WorkerDiedError("the engine died and can't be started again")

    with pytest.raises(WorkerDiedError):
        answer_rows(Broken(), iter([Row(0, 1, {"prompt": "x"})]))
