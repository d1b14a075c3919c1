"""A model that gets into trouble on the rank, at the place and in the way that its prompt asks for."""

import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from infinilm.distributed import CommunicationGroup, group
from infinilm.models import CausalLM, LlamaConfig, register_model

MARK = 300
"""The token after which the trouble is described; never generated."""
ALL_RANKS = 9
UNLOADABLE = 7
"""A beginning-of-text token with which no rank but the driver loads the model."""
PLACES = ("before", "between", "logits")
"""Before the first collective, before the last layer, before the collective of the logits."""


class TroubleError(Exception):
    """An error that only this module knows."""


class PickyError(Exception):
    """One that can't be made of its message."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(code)
        self.where = where

    def __str__(self) -> str:
        return f"code {self.args[0]} at {self.where}"


def _raise(error: BaseException) -> NoReturn:
    raise error


def _be_slow() -> None:
    for _ in range(600):
        time.sleep(0.1)


def _make_joining_slow() -> NoReturn:
    """The next rendezvous comes too early for this rank, the one after it does not."""
    join, timeout = CommunicationGroup.join, group.JOIN_TIMEOUT

    def come_late(self: CommunicationGroup, rendezvous: int) -> None:
        CommunicationGroup.join = join  # type: ignore[method-assign]
        time.sleep(0.6)
        try:
            join(self, rendezvous)
        finally:
            group.JOIN_TIMEOUT = timeout

    CommunicationGroup.join = come_late  # type: ignore[method-assign]
    group.JOIN_TIMEOUT = timedelta(seconds=0.1)
    raise ValueError("a bad value")


def _make_joining_deadly() -> NoReturn:
    CommunicationGroup.join = lambda *_: os._exit(4)  # type: ignore[method-assign]
    raise ValueError("a bad value")


ACTIONS: dict[str, Callable[[], object]] = {
    "value": lambda: _raise(ValueError("a bad value")),
    "own": lambda: _raise(TroubleError("in trouble")),
    "picky": lambda: _raise(PickyError(7, where="home")),
    "key": lambda: _raise(KeyError("missing")),
    "file": lambda: Path("no such file").read_bytes(),
    "memory": lambda: _raise(MemoryError("no more")),
    "device memory": lambda: _raise(torch.OutOfMemoryError("tried to allocate 7 GiB")),
    "leave": lambda: _raise(SystemExit(5)),
    "exit": lambda: os._exit(3),
    "sleep": _be_slow,
    "nap": lambda: time.sleep(0.05),
    "join late": _make_joining_slow,
    "die joining": _make_joining_deadly,
}


def trouble(action: str, rank: int = ALL_RANKS, place: str = "between") -> list[int]:
    """The prompt to ask for it."""
    return [MARK, list(ACTIONS).index(action), rank, PLACES.index(place)]


class TroubledModel(CausalLM):
    """A Llama, but for the trouble."""

    def __init__(self, config: LlamaConfig, *, group: CommunicationGroup, **options: Any) -> None:
        """In a pipeline, the trouble is that of a rank counted over all stages."""
        super().__init__(config, group=group, **options)
        if config.bos_token_id == UNLOADABLE and "rank_process" in sys.argv[0]:
            raise TroubleError("it won't be loaded")
        self._rank = self.stage.index * group.size + group.rank
        self._order: Sequence[int] = ()
        model = weakref.proxy(self)  # a cycle would keep the weights until they are searched for
        self.layers[-1].register_forward_pre_hook(lambda *_: model._act("between"))

    def forward(self, batch: Any, *args: Any) -> Tensor:
        ids = batch.input_ids.tolist()
        self._order = ids[ids.index(MARK) + 1 :] if MARK in ids else ()
        self._act("before")
        return super().forward(batch, *args)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self._act("logits")
        logits = super().compute_logits(hidden)
        if self.group.rank == 0:
            logits[:, MARK:] = -1e4
        return logits

    def _act(self, place: str) -> None:
        if self._order and PLACES[self._order[2]] == place and self._order[1] in (self._rank, ALL_RANKS):
            list(ACTIONS.values())[self._order[0]]()


register_model("troubled", "TroubledForCausalLM", builder=TroubledModel)


def save_troubled(directory: Path) -> Path:
    """A checkpoint of the model, with six heads so that three ranks can share it."""
    # Heavy imports, which a rank has no use for.
    from checkpoints import make_reference, save
    from tiny_tokenizer import save_tokenizer

    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 96}
    save(make_reference("llama-mha", vocab_size=MARK + 3, eos_token_id=1, bos_token_id=0, **sizes), directory)
    save_tokenizer(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "troubled", "architectures": ["TroubledForCausalLM"]}))
    return directory
