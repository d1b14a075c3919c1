"""`infinilm info`: a model's shape and memory needs. `infinilm pull`: downloads a model."""

import json
import math
from collections import Counter
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from infinilm.cli.display import console, format_count, make_facts, make_table
from infinilm.cli.options import ModelArgument
from infinilm.config import Config
from infinilm.errors import CheckpointError, InfinilmError, InvalidValueError
from infinilm.platforms import HOST, HostDevice, has_torch, may_have_gpu, require_torch
from infinilm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from infinilm.loading.checkpoint import Checkpoint
    from infinilm.models import ModelConfig
    from infinilm.text.tokenizer import Tokenizer

# The memory table compares the needs of these types.
DTYPES = ("float32", "bfloat16")
QUANTIZED = "quantised"  # weights as they are stored
HALVES = "16-bit weights"  # dense weights kept in 16 bits on a CPU, which computes in float32


def collect_facts(path: Path, tp_size: int = 1, num_stages: int = 1) -> dict[str, Any]:
    """Everything that `infinilm info` prints, as plain values. Reads no weights.

    For a model that the engine can't run: the facts in its headers, and why it can't be run.
    """
    from infinilm.loading.checkpoint import open_checkpoint
    from infinilm.models import ModelConfig
    from infinilm.models.config import text_config

    try:
        with closing(open_checkpoint(path)) as checkpoint:
            config = ModelConfig.from_dict(checkpoint.config)
            is_part = text_config(checkpoint.config) is not checkpoint.config
            whole = {"part_of": checkpoint.config.get("model_type") if is_part else None}
            return whole | _collect(checkpoint, config, path, tp_size, num_stages)
    except CheckpointError as error:
        return _describe_refused(path, error)


def _describe_refused(path: Path, error: CheckpointError) -> dict[str, Any]:
    """The facts in the headers of a model that can't be run. If they can't be read either, the error is raised."""
    from infinilm.loading.gguf import GGUFFile
    from infinilm.loading.safetensors_checkpoint import count_stored
    from infinilm.text.hf_tokenizer import read_json

    try:
        if path.is_dir():
            config, stored = read_json(path / "config.json"), count_stored(path)
            names = [config.get("model_type"), *(config.get("architectures") or [])]
        else:
            with closing(GGUFFile(path)) as opened:
                names, stored = [opened.metadata.get("general.architecture")], Counter()
                for tensor in opened.tensors.values():
                    stored[tensor.ggml_type.name] += math.prod(tensor.shape)
    except InfinilmError:
        raise error from None
    if not any(names):
        raise error
    return {
        "path": str(path),
        "runs": False,
        "why_not": str(error).removeprefix(f"{path}: "),
        "num_bytes": size_on_disk(path),
        "license": find_license(path),
        "architecture": ", ".join(str(name) for name in names if name),
        "num_parameters": stored.total(),
        "stored_as": dict(stored.most_common()),
    }


def _collect(
    checkpoint: "Checkpoint", config: "ModelConfig", path: Path, tp_size: int, num_stages: int
) -> dict[str, Any]:
    from infinilm.models.auto import check_described, find_default_sampling

    why_not = None
    try:
        check_described(checkpoint, config)
        _check_torch(checkpoint, config)
    except InfinilmError as error:
        why_not = str(error).removeprefix(f"{path}: ")
    tokenizer = checkpoint.tokenizer()
    stored: Counter[str] = Counter()
    formats = checkpoint.formats()
    for name, shape in checkpoint.shapes().items():
        stored[formats[name]] += math.prod(shape)
    memory = _memory_needs(checkpoint, config, stored.total())
    sampling = find_default_sampling(checkpoint)
    ranks = _rank_needs(config, tp_size, num_stages) if tp_size * num_stages > 1 else []
    return {
        "path": str(path),
        "runs": why_not is None,
        "why_not": why_not,
        "num_bytes": size_on_disk(path),
        "license": find_license(path),
        "architecture": config.model_type,
        "num_parameters": stored.total(),
        "stored_as": dict(stored.most_common()),
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "experts": config.count_experts(),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope": dict(config.main_rope),
        "sliding_window": config.sliding_window,
        "vocab_size": config.vocab_size,
        "tied_head": config.tie_word_embeddings,
        "max_context_len": config.max_context_len(),
        "tokenizer": _describe_tokenizer(tokenizer) if tokenizer else None,
        "sampling": sampling.model_defaults(),
        "deterministic": _describe_guarantee(checkpoint, config, memory["device"], tp_size, num_stages),
        "memory": memory,
        "ranks": ranks,
    }


def _check_torch(checkpoint: "Checkpoint", config: "ModelConfig") -> None:
    """Refuse a model that needs torch if torch is not installed."""
    if not has_torch() and (reason := _why_torch(checkpoint, config)) is not None:
        with require_torch(reason):
            import_module("torch")


def _why_torch(checkpoint: "Checkpoint", config: "ModelConfig") -> str | None:
    """Why a model needs torch on a CPU; None if it does not."""
    from infinilm.models.native_model import why_not_alone
    from infinilm.models.quantization import choose_formats

    formats = choose_formats(checkpoint, config.model_type, quantization=None, dtype="auto", device=HOST)
    return why_not_alone(config, formats)


def _describe_guarantee(
    checkpoint: "Checkpoint", config: "ModelConfig", device: str, tp_size: int, num_stages: int
) -> str:
    """Whether results would depend on the request alone, as far as it is known beforehand."""
    from infinilm.executor.guarantee import Guarantee, known_reasons
    from infinilm.models.auto import select_attention

    # Only a device's kind matters here.
    attention = select_attention("auto", config, cast(Any, HostDevice(device)), prefers_native=device == "cpu")
    is_native = device == "cpu" and tp_size * num_stages == 1 and _why_torch(checkpoint, config) is None
    default = "triton" if device.startswith("cuda") else "torch"
    backend = default if attention == "auto" else attention
    found = Guarantee(tuple(known_reasons(device, backend, tp_size, is_native=is_native, is_ordered=True)))
    if not found.holds:
        return str(found)
    return "yes" if is_native or _is_ordered(checkpoint, config, device, tp_size) else "yes, with deterministic=True"


def _is_ordered(checkpoint: "Checkpoint", config: "ModelConfig", device: str, tp_size: int) -> bool:
    """Whether sums have one order by default, if the native library computes attention on a CPU."""
    if device == "cpu":
        from infinilm.models.quantization import has_native_floats

        return has_native_floats(config.model_type)
    import torch

    from infinilm.models.auto import make_choices

    return make_choices(config, checkpoint, torch.device(device), tp_size).formats.is_ordered


def size_on_disk(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def find_license(path: Path) -> str | None:
    from infinilm.loading.sources import find_source

    if source := find_source(path):
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


def _memory_needs(checkpoint: "Checkpoint", model_config: "ModelConfig", num_parameters: int) -> dict[str, Any]:
    """By type: the bytes of the weights, of one cached token and of a full context, and how many tokens fit here."""
    from infinilm.distributed import DistConfig
    from infinilm.executor.loader import select_devices
    from infinilm.executor.memory import context_bytes, free_memory_bytes
    from infinilm.executor.workspace import estimate_workspace
    from infinilm.models.auto import check_fp8_cache
    from infinilm.models.quantization import choose_formats

    config, max_len = Config(), model_config.max_context_len()
    device: Any = select_devices(config.device, DistConfig())[0] if may_have_gpu() else HOST
    free_bytes = free_memory_bytes(device)
    needs: dict[str, Any] = {"device": str(device), "free_bytes": free_bytes}
    # By name: the compute dtype, the cache dtype, and the bytes of the weights.
    dtypes = {name: _find_dtype(name, device) for name in DTYPES}
    kinds = {name: (dtype, dtype, num_parameters * dtype.itemsize) for name, dtype in dtypes.items()}
    settings: Any = {"quantization": None, "dtype": "auto", "device": device, "keeps_halves": True}
    formats = choose_formats(checkpoint, model_config.model_type, **settings)
    if formats.by_name or formats.halves:
        names = ("float32", "float16" if formats.by_name else "float32")
        names = names if device.type == "cpu" else ("bfloat16", "bfloat16")
        weight_bytes = _weigh_quantized(model_config, formats, names[0], device)
        kinds[QUANTIZED if formats.by_name else HALVES] = (*(_find_dtype(name, device) for name in names), weight_bytes)
    for name, (dtype, kv_dtype, weight_bytes) in kinds.items():
        token_bytes = context_bytes(model_config, 2, kv_dtype) - context_bytes(model_config, 1, kv_dtype)
        workspace_bytes = estimate_workspace(config, model_config, dtype, device, max_model_len=max_len).total(max_len)
        left = int(free_bytes * config.gpu_memory_utilization) - weight_bytes - workspace_bytes
        needs[name] = {
            "weight_bytes": weight_bytes,
            "workspace_bytes": workspace_bytes,
            "kv_bytes_per_token": token_bytes,
            "kv_bytes_of_max_context": context_bytes(model_config, max_len, kv_dtype),
            "num_tokens_that_fit": max(left // token_bytes, 0),
        }
        if not has_torch():  # such a cache needs it
            continue
        with suppress(InvalidValueError):  # some models and devices have no such cache
            check_fp8_cache("kv_cache_dtype", model_config, device)
            float8 = import_module("torch").float8_e4m3fn
            sizes = [context_bytes(model_config, count, float8) for count in (1, 2)]
            needs[name]["fp8_kv_bytes_per_token"] = sizes[1] - sizes[0]
    return needs


def _find_dtype(name: str, device: Any) -> Any:
    """An object with the type's size. On a CPU only the size matters, and NumPy has no bfloat16."""
    if device.type == "cpu":
        from numpy import dtype

        return dtype("uint16" if name == "bfloat16" else name)
    return getattr(import_module("torch"), name)


def _weigh_quantized(config: "ModelConfig", formats: Any, dtype: str, device: Any) -> int:
    from infinilm.models.auto import outline_model
    from infinilm.models.native_model import NativeModel, why_not_alone

    if device.type == "cpu" and why_not_alone(config, formats) is None:
        return NativeModel(cast(Any, config), formats, 1, is_outline=True).num_bytes()
    if not has_torch():  # the model can't run here, which is reported elsewhere
        return 0
    return outline_model(config, getattr(import_module("torch"), dtype), formats=formats).num_bytes()


def _rank_needs(config: "ModelConfig", tp_size: int, num_stages: int) -> list[dict[str, Any]]:
    """By pipeline stage: its layers, and by type the bytes of the weights and of one cached token on each rank."""
    with require_torch("a model on several ranks"):
        import torch
    from infinilm.executor.memory import token_bytes
    from infinilm.models.auto import outline_model
    from infinilm.models.stages import Stage

    needs = []
    for rank in range(0, tp_size * num_stages, tp_size):
        parts = {
            name: outline_model(config, getattr(torch, name), tp_size, rank, num_stages=num_stages) for name in DTYPES
        }
        stage: Stage = getattr(parts[DTYPES[0]], "stage", Stage.whole(config.num_hidden_layers))
        needs.append(
            {
                "stage": stage.index,
                "layers": [stage.layers.start, stage.layers.stop - 1],
                "num_ranks": tp_size,
                "weight_bytes": {name: part.num_bytes() for name, part in parts.items()},
                "kv_bytes_per_token": {
                    name: token_bytes(config, tp_size, stage.layers, getattr(torch, name)) for name in DTYPES
                },
            }
        )
    return needs


def info(
    model: ModelArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "--tp", min=1, metavar="N", help="Ranks that share each layer.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", "--pp", "-p", min=1, metavar="N", help="Stages of the layers.")
    ] = 1,
) -> None:
    """Show what a model is, whether the engine runs it, and whether it fits into memory. Its weights are not read."""
    from infinilm.loading.sources import resolve

    facts = collect_facts(resolve(model), tensor_parallel_size, pipeline_parallel_size)
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        _show(facts)
    if not facts["runs"]:
        raise typer.Exit(1)


def _show(facts: dict[str, Any]) -> None:
    screen = console()
    screen.print(make_facts(_describe(facts)))
    if "memory" in facts:
        screen.print()
        screen.print(_memory_table(facts))
    if facts.get("ranks"):
        screen.print()
        screen.print(_rank_table(facts))


def _describe(facts: dict[str, Any]) -> dict[str, str]:
    from infinilm.executor.memory import format_bytes

    stored = ", ".join(f"{name} ({format_count(count)})" for name, count in facts["stored_as"].items())
    described = {
        "model": facts["path"],
        "licence": facts["license"] or "not named in the files",
        "architecture": facts["architecture"],
        "runs": "yes" if facts["runs"] else f"no: {facts['why_not']}",
        "parameters": format_count(facts["num_parameters"]),
        "stored as": f"{stored}; {format_bytes(facts['num_bytes'])} on disk",
    }
    return described | _describe_model(facts) if "num_layers" in facts else described


def _describe_model(facts: dict[str, Any]) -> dict[str, str]:
    tokenizer, experts = facts["tokenizer"], facts["experts"]
    rope = {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in facts["rope"].items()
        if not isinstance(value, list)
    }
    rope_type = rope.pop("rope_type")
    whole = facts["part_of"]
    return {
        "architecture": facts["architecture"]
        + (f", the text part of a {whole} model: images and sound are refused" if whole else ""),
        "parameters": f"{format_count(facts['num_parameters'])}{', head tied to embedding' * facts['tied_head']}",
        "layers": f"{facts['num_layers']} of width {facts['hidden_size']}, MLP {facts['intermediate_size']}"
        + (
            ", {count} experts of {size}, {per_token} per token, in {layers} layers".format(**experts)
            if experts
            else ""
        ),
        "attention": f"{facts['num_attention_heads']} heads, {facts['num_key_value_heads']} for keys and values, "
        f"of {facts['head_dim']}; "
        + (f"window of {facts['sliding_window']} tokens" if facts["sliding_window"] else "no sliding window"),
        "rope": ", ".join([rope_type, *(f"{name.removeprefix('rope_')} {value}" for name, value in rope.items())]),
        "context": f"{facts['max_context_len']:,} tokens",
        "vocabulary": f"{facts['vocab_size']:,} tokens",
        "tokenizer": f"{tokenizer['kind']}, {'with' if tokenizer['has_chat_template'] else 'without'} chat template"
        if tokenizer
        else "none",
        "determinism": facts["deterministic"],
        "sampling": ", ".join(f"{name} {value:g}" for name, value in _own_sampling(facts["sampling"]).items()),
    }


def _own_sampling(sampling: dict[str, float]) -> dict[str, float]:
    """The temperature, and the other parameters that differ from their defaults."""
    usual = SamplingParams().model_defaults()
    return {name: value for name, value in sampling.items() if name == "temperature" or value != usual[name]}


def _memory_table(facts: dict[str, Any]) -> "Table":
    from infinilm.executor.memory import format_bytes

    needs, context = facts["memory"], facts["max_context_len"]
    kinds = [name for name in (*DTYPES, QUANTIZED, HALVES) if name in needs]
    table = make_table("memory", *kinds)
    rows = {
        "weights": "weight_bytes",
        "workspace, at most": "workspace_bytes",
        "KV cache, one token": "kv_bytes_per_token",
        "KV cache as fp8, one token": "fp8_kv_bytes_per_token",
        f"KV cache, {context:,} tokens": "kv_bytes_of_max_context",
    }
    for label, key in rows.items():
        if all(key in needs[name] for name in kinds):
            table.add_row(label, *(format_bytes(needs[name][key]) for name in kinds))
    table.add_section()
    fits = [needs[name]["num_tokens_that_fit"] for name in kinds]
    where = f"{format_bytes(needs['free_bytes'])} free on {needs['device']}"
    table.add_row(f"fits here, {where}", *(f"{num_tokens:,} tokens" if num_tokens else "no" for num_tokens in fits))
    table.add_row("", *(_sequences(num_tokens, context) for num_tokens in fits), style="dim")
    return table


def _rank_table(facts: dict[str, Any]) -> "Table":
    from infinilm.executor.memory import format_bytes

    table = make_table(
        "each rank of", *(f"weights, {name}" for name in DTYPES), *(f"a token, {name}" for name in DTYPES)
    )
    for part in facts["ranks"]:
        first, last = part["layers"]
        sizes = [format_bytes(part[key][name]) for key in ("weight_bytes", "kv_bytes_per_token") for name in DTYPES]
        table.add_row(f"stage {part['stage']}, layers {first} to {last}", *sizes)
    return table


def _sequences(num_tokens: int, context: int) -> str:
    """How many sequences of full length fit, or how long a single one may be."""
    num_full = num_tokens // context
    return f"{num_full} × {context:,}" if num_full else f"1 × {num_tokens:,}" if num_tokens else ""


def pull(
    model: ModelArgument = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the aliases instead, with sizes and licences.")
    ] = False,
) -> None:
    """Download a model, unless that was done before, and print where it is."""
    from infinilm.loading.sources import ALIASES, DEFAULT_MODEL
    from infinilm.loading.sources import pull as fetch

    if show_list:
        if model is not None:
            raise InvalidValueError(f"--list fetches nothing; leave out {model!r} or --list")
        table = make_table("alias", "size", "licence", "file")
        for alias, source in ALIASES.items():
            mark = " (default)" if alias == DEFAULT_MODEL else ""
            table.add_row(alias + mark, _megabytes(source.num_bytes), source.license, source.member.rpartition("/")[2])
        console().print(table)
        return
    path = fetch(model)
    facts = {
        "path": str(path),
        "size": _megabytes(size_on_disk(path)),
        "licence": find_license(path) or "not named in the files; see where the model was published",
    }
    console().print(make_facts(facts), soft_wrap=True)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
