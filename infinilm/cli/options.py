"""Command-line options shared by several commands.

A command has a parameter such as `config: Config`; a decorator replaces it by options. The classes built from the
options check their values.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any

import typer

from infinilm.cli.help import option
from infinilm.config import ATTENTION_BACKENDS, EXECUTORS, PRESETS, QUANTIZATIONS, Config
from infinilm.platforms import DEVICES
from infinilm.sampling_params import SamplingParams

Command = Callable[..., None]

MODEL_HELP = (
    "A directory, a .gguf file, an id on the Hugging Face hub (org/name) or an alias (infinilm pull --list). "
    "Default: the embedded model."
)
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]


def _engine_option(kind: Any, help: str, *names: str) -> Any:
    return option("Engine", kind | None, help, *names)


def _sampling_option(kind: Any, help: str, *names: str) -> Any:
    return option("Sampling", kind, help, *names, show_default=True)


def _size_option(help: str) -> Any:
    return option("Workload", int | None, help)


_TP_OPTION = ("GPUs, or processes on a CPU, that share the model. Default: 1.", "--tensor-parallel-size", "--tp")
_ENGINE_OPTIONS = {
    "model": _engine_option(str, MODEL_HELP, "--model", "-m"),
    "preset": _engine_option(str, f"Ready-made settings: {', '.join(PRESETS)}."),
    "dtype": _engine_option(str, "The type to compute in: auto, float32, float16, bfloat16. auto: float32 on a CPU."),
    "quantization": _engine_option(
        str,
        f"How weights are kept: {', '.join(QUANTIZATIONS)}. Default: as the checkpoint has them.",
    ),
    "activation_bits": _engine_option(
        int, "Bits of what quantised matrices are multiplied with on a CPU: 16, or 8 for faster prompts. Default: 16."
    ),
    "kv_cache_dtype": _engine_option(
        str, "The type of the KV cache: auto, fp8, float32, float16, bfloat16. auto: float16 with quantised weights."
    ),
    "device": _engine_option(str, f"Where to compute: {', '.join(DEVICES)}, or the device type of a torch plug-in."),
    "tensor_parallel_size": _engine_option(int, *_TP_OPTION),
    "pipeline_parallel_size": _engine_option(
        int, "Stages that the layers are divided into. Default: 1.", "--pipeline-parallel-size", "--pp", "-p"
    ),
    "executor": _engine_option(str, f"Where several ranks run: {', '.join(EXECUTORS)}. Default: processes."),
    "attention_backend": _engine_option(str, f"What computes attention: {', '.join(ATTENTION_BACKENDS)}."),
    "deterministic": _engine_option(
        bool,
        "Give a request the same answer, bit for bit, whatever else is computed. Default: where that costs little: "
        "on a CPU unless dtype has 16 bits; for dense models of 7 billion parameters or more on a Hopper GPU.",
        "--deterministic/--no-deterministic",
    ),
    "max_model_len": _engine_option(int, "Most tokens of prompt and answer together. Default: the checkpoint's."),
    "max_num_seqs": _engine_option(int, f"Most requests at a time. Default: {Config.max_num_seqs}."),
    "max_num_batched_tokens": _engine_option(
        int, f"Most tokens computed in one step. Default: {Config.max_num_batched_tokens}."
    ),
    "num_kvcache_blocks": _engine_option(
        int, "Size of the KV cache, which holds the tokens of all requests, in blocks of 16. Default: what fits."
    ),
    "gpu_memory_utilization": _engine_option(
        float,
        f"The share of the free memory that may be used, on any device. Default: {Config.gpu_memory_utilization}.",
    ),
}

_VERBOSE = option("Engine", bool, "Say more at start: where the memory goes, what computes.", "--verbose", "-v")

_SAMPLING_OPTIONS = {
    "temperature": _sampling_option(
        float | None,
        "0: always the most likely token. Default of this and the next four: the model's (infinilm info).",
        "--temperature",
        "-t",
    ),
    "top_p": _sampling_option(float | None, "Draw from the likeliest tokens with this total probability."),
    "top_k": _sampling_option(int | None, "Draw from this many of the likeliest tokens; -1: from all."),
    "min_p": _sampling_option(float | None, "Leave out tokens below this share of the likeliest one's probability."),
    "repetition_penalty": _sampling_option(float | None, "Above 1: repeated tokens become less likely."),
    "max_tokens": _sampling_option(int, "Tokens to generate at most.", "--max-tokens", "-n"),
    "seed": _sampling_option(int | None, "Makes draws repeatable."),
    "stop": _sampling_option(list[str] | None, "End at this text. Can be given several times."),
    "n": _sampling_option(int | None, "Answers per prompt. Default: 1.", "--n"),
    "logprobs": _sampling_option(int | None, "With --json: log-probabilities of this many tokens at each position."),
}

_SIZE_OPTIONS = {
    "num_prompts": _size_option("Prompts, instead of the workload's own number."),
    "input_len": _size_option("Tokens of each prompt."),
    "output_len": _size_option("Tokens of each answer."),
    "shared_prefix_len": _size_option("Tokens that all prompts begin with."),
    "concurrency": _size_option("Requests at a time; 0: all."),
}


def takes_config(*, without: tuple[str, ...] = (), has_short_tp: bool = False) -> Callable[[Command], Command]:
    """Replace a command's parameter `config` by the engine's options, except `without`.

    `has_short_tp`: `-t` is the tensor parallel size, not the temperature.
    """
    options = {name: (kind, None) for name, kind in _ENGINE_OPTIONS.items() if name not in without}
    if has_short_tp:
        options["tensor_parallel_size"] = (_engine_option(int, *_TP_OPTION, "-t"), None)
    return expand("config", {**options, "verbose": (_VERBOSE, False)}, _make_config)


def takes_sampling(*, without: tuple[str, ...] = (), **defaults: Any) -> Callable[[Command], Command]:
    """Replace a command's parameter `sampling` by the sampling options, except `without`.

    The command gets a dict of the given ones. It merges them with the model's defaults once the model is loaded.
    """
    options = {name: (kind, defaults.get(name)) for name, kind in _SAMPLING_OPTIONS.items() if name not in without}
    return expand("sampling", options, _check_sampling)


def _make_config(*, preset: str | None = None, verbose: bool, **settings: Any) -> Config:
    if verbose:
        logging.getLogger("infinilm").setLevel(logging.DEBUG)
    given = _drop_none(**settings)
    return Config.preset(preset, **given) if preset is not None else Config.from_kwargs(**given)


def _check_sampling(**settings: Any) -> dict[str, Any]:
    given = _drop_none(**settings)
    SamplingParams.from_kwargs(**given)  # wrong values are refused before the model is loaded
    return given


def takes_sizes() -> Callable[[Command], Command]:
    """Replace a command's parameter `sizes` by the options that change a workload's sizes."""
    return expand("sizes", {name: (kind, None) for name, kind in _SIZE_OPTIONS.items()}, _drop_none)


def _drop_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def expand(
    parameter: str, options: Mapping[str, tuple[Any, Any]], build: Callable[..., Any]
) -> Callable[[Command], Command]:
    """Replace a command's `parameter` by `options` (type and default by name), whose values `build` turns into it."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def expanded(**arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in options}
            command(**arguments, **{parameter: build(**values)})

        signature = inspect.signature(command)
        own = [item for item in signature.parameters.values() if item.name != parameter]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for name, (kind, default) in options.items()
        ]
        expanded.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return expanded

    return decorate
