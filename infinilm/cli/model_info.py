"""What a checkpoint's headers say about a model, and the memory it needs here."""

import json
import math
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.config import Config

if TYPE_CHECKING:
    from infinilm.loading.checkpoint import Checkpoint
    from infinilm.models import LlamaConfig
    from infinilm.text.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16")  # types whose memory needs are compared …
QUANTIZED = "quantised"  # … with those of weights kept as they are stored


def collect_facts(path: Path) -> dict[str, Any]:
    """Everything that `infinilm info` prints, as plain values. Reads no weights."""
    from infinilm.loading.checkpoint import open_checkpoint
    from infinilm.models import LlamaConfig

    checkpoint = open_checkpoint(path)
    try:
        config = LlamaConfig.from_dict(checkpoint.config)
        tokenizer = checkpoint.tokenizer()
        num_parameters = sum(math.prod(shape) for shape in checkpoint.shapes().values())
        memory = _memory_needs(checkpoint, config, num_parameters)
    finally:
        checkpoint.close()
    return {
        "path": str(path),
        "num_bytes": size_on_disk(path),
        "license": find_license(path),
        "architecture": config.model_type,
        "num_parameters": num_parameters,
        "stored_as": count_stored_types(path),
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope": config.rope_parameters,
        "sliding_window": config.sliding_window,
        "vocab_size": config.vocab_size,
        "tied_head": config.tie_word_embeddings,
        "max_context_len": config.max_context_len(),
        "tokenizer": _describe_tokenizer(tokenizer) if tokenizer else None,
        "memory": memory,
    }


def size_on_disk(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def count_stored_types(path: Path) -> dict[str, int]:
    """How many numbers are stored in each type, most frequent first."""
    counts: Counter[str] = Counter()
    if path.is_dir():
        for file in path.glob("*.safetensors"):
            for name, tensor in _safetensors_header(file).items():
                if name != "__metadata__":
                    counts[tensor["dtype"]] += math.prod(tensor["shape"])
    else:
        from infinilm.loading.gguf import GGUFFile

        with closing(GGUFFile(path)) as opened:
            for info in opened.tensors.values():
                counts[info.ggml_type.name] += math.prod(info.shape)
    return dict(counts.most_common())


def _safetensors_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        num_bytes = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(num_bytes))
    return header


def find_license(path: Path) -> str | None:
    from infinilm.loading.sources import ALIASES

    for source in ALIASES.values():
        if Path(source.member).name == path.name:
            return source.license
    if path.is_dir():
        return None
    from infinilm.loading.gguf import GGUFFile

    with closing(GGUFFile(path)) as opened:
        name = opened.metadata.get("general.license")
    return name if isinstance(name, str) else None


def _describe_tokenizer(tokenizer: "Tokenizer") -> dict[str, Any]:
    kind = type(tokenizer.backend.model).__name__
    return {
        "kind": f"byte-level {kind}" if tokenizer.is_byte_level else kind,
        "vocab_size": tokenizer.vocab_size,
        "has_chat_template": tokenizer.chat_template is not None,
    }


def _memory_needs(checkpoint: "Checkpoint", model_config: "LlamaConfig", num_parameters: int) -> dict[str, Any]:
    """By type: bytes of the weights, of one token and of a full context in the cache, and how many tokens fit here."""
    import torch

    from infinilm.distributed import DistConfig
    from infinilm.executor.loader import select_devices
    from infinilm.executor.memory import free_memory_bytes
    from infinilm.executor.workspace import estimate_workspace
    from infinilm.models.auto import outline_model
    from infinilm.models.quantization import choose_formats

    config, max_len = Config(), model_config.max_context_len()
    (device,) = select_devices(config.device, DistConfig())
    free_bytes = free_memory_bytes(device)
    needs: dict[str, Any] = {"device": str(device), "free_bytes": free_bytes}
    # By name: the type that is computed in, that of the cache, and the bytes of the weights.
    kinds = {name: (dtype := getattr(torch, name), dtype, num_parameters * dtype.itemsize) for name in DTYPES}
    formats = choose_formats(checkpoint, model_config.model_type, quantization=None, dtype="auto", device=device)
    if formats.by_name:
        weight_bytes = outline_model(model_config, torch.float32, formats=formats).num_bytes()
        kinds[QUANTIZED] = (torch.float32, torch.float16, weight_bytes)
    for name, (dtype, kv_dtype, weight_bytes) in kinds.items():
        token_bytes = 2 * model_config.num_hidden_layers * model_config.kv_dim() * kv_dtype.itemsize
        workspace = estimate_workspace(config, model_config, dtype, device, max_model_len=max_len)
        workspace_bytes = workspace.total(max_len)
        left = int(free_bytes * config.gpu_memory_utilization) - weight_bytes - workspace_bytes
        needs[name] = {
            "weight_bytes": weight_bytes,
            "workspace_bytes": workspace_bytes,
            "kv_bytes_per_token": token_bytes,
            "kv_bytes_of_max_context": token_bytes * max_len,
            "num_tokens_that_fit": max(left // token_bytes, 0),
        }
    return needs
