"""An engine for users' own Ray Data pipelines."""

import asyncio
import json
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np

from infinilm.batch.answering import Answer, RowOptions, check_sampling
from infinilm.batch.engine_host import EngineHost
from infinilm.batch.ray_job import import_ray
from infinilm.batch.rows import Row
from infinilm.config import Config
from infinilm.server.direct import DirectService


def engine_actor(
    model: Any = None,
    *,
    sampling: Mapping[str, Any] | None = None,
    chat: bool = False,
    fields: tuple[str, ...] = ("prompt", "messages"),
    **settings: Any,
) -> type:
    """A class for `ray.data.Dataset.map_batches` that answers each row of a batch.

    `fields` are the columns that make the request, as far as the dataset has them; other columns pass through. Rows are
    those of `infinilm batch`; `sampling`, `chat`, `model` and `settings` are those of `infinilm.batch.run`. The new
    columns are `answer` (the text of the first choice), `response` (the reply in JSON) and `error` (why there is no
    answer). If the engine dies and can't be started again, the actor's process ends, and Ray replaces it.
    """
    import_ray()
    check_sampling(sampling or {})
    config = model.replace(**settings) if isinstance(model, Config) else Config.from_kwargs(model=model, **settings)
    options = RowOptions(sampling=dict(sampling or {}), as_chat=chat)

    class InfinilmEngine(EngineActor):
        def __init__(self) -> None:
            super().__init__(config, options, fields)

    return InfinilmEngine


class EngineActor:
    """One engine. Batches that Ray passes at the same time are computed together."""

    def __init__(self, config: Config, options: RowOptions, fields: tuple[str, ...]) -> None:
        self._fields = fields
        self._numbers = count()
        self._host = EngineHost(lambda: DirectService(config), options)

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        answers = await self._host.call(self._answer(batch))
        return {
            **batch,
            "answer": [_text_of(each) for each in answers],
            "response": [None if each.body is None else each.body.decode() for each in answers],
            "error": [each.error for each in answers],
        }

    async def _answer(self, batch: Mapping[str, Any]) -> list[Answer]:
        names = [name for name in self._fields if name in batch]
        size = len(next(iter(batch.values()), ()))
        rows = [
            Row(next(self._numbers), index + 1, {name: _plain(batch[name][index]) for name in names})
            for index in range(size)
        ]
        return await asyncio.gather(*(self._host.answerer.answer(row, {}) for row in rows))


def _plain(value: Any) -> Any:
    """A value of a NumPy batch as JSON data."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _text_of(answer: Answer) -> str | None:
    if answer.error is not None or answer.body is None:
        return None
    choice = json.loads(answer.body)["choices"][0]
    text: str | None = choice["message"]["content"] if "message" in choice else choice["text"]
    return text
