"""A model whose last rank runs out of memory while it is made, if it is for long texts."""

import json
import weakref
from pathlib import Path
from typing import Any

import torch

from infinilm.distributed import CommunicationGroup
from infinilm.models import CausalLM, LlamaConfig, register_model

MAX_LEN = 64
"""It can be made for texts of so many tokens."""

alive: "weakref.WeakSet[HungryModel]" = weakref.WeakSet()
"""Those of this process with weights that anybody still holds."""


class HungryModel(CausalLM):
    """A Llama, but for its hunger."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        max_len: int,
        device: torch.device,
        group: CommunicationGroup,
        **options: Any,
    ) -> None:
        super().__init__(config, max_len=max_len, device=device, group=group, **options)
        if device.type == "meta":
            return
        alive.add(self)
        if group.rank == group.size - 1 and max_len > MAX_LEN:
            raise torch.OutOfMemoryError("tried to allocate 7 GiB")


register_model("hungry", "HungryForCausalLM", builder=HungryModel)


def save_hungry(directory: Path) -> Path:
    """A checkpoint of the model."""
    # Heavy imports, which a rank has no use for.
    from checkpoints import make_reference, save

    path = save(make_reference("llama-gqa"), directory) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "hungry", "architectures": ["HungryForCausalLM"]}))
    return directory
