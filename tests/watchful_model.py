"""A model of two stages whose second waits, at work on a step, until the first has begun the next."""

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from infinilm.models import CausalLM, register_model

LOG = "INFINILM_TEST_LOG"
"""The environment variable that names the file in which the stages note what they do."""


class WatchfulModel(CausalLM):
    """A Llama that takes its time. `patience_s` is how long the second stage waits."""

    patience_s = 0.0
    num_begun = 0

    def forward(self, *args: Any) -> Tensor:
        log = Path(os.environ[LOG])
        self.num_begun += 1
        if self.stage.is_first:
            note(log, "began")
            return super().forward(*args)
        end_time = time.monotonic() + self.patience_s
        while not (found := log.read_text().count("began") > self.num_begun) and time.monotonic() < end_time:
            time.sleep(0.001)
        if found:
            note(log, "overlapped")
        return super().forward(*args)


def note(log: Path, event: str) -> None:
    with log.open("a") as file:
        file.write(event + "\n")


register_model("watchful", "WatchfulForCausalLM", builder=WatchfulModel)
