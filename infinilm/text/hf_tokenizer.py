"""Reads the tokenizer of a Hugging Face directory: tokenizer.json and the files beside it. Code in it is never run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from infinilm.errors import CheckpointError
from infinilm.text.gguf_tokenizer import use_sentencepiece_pipeline
from infinilm.text.native_tokenizer import NativeTokenizer

_UNCONVERTED_FILES = (
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "tiktoken.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


def read_directory(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]] | None:
    """The tokenizer, its special tokens by role and its chat templates by name; None if the directory has none."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    if not (path / "tokenizer.json").is_file():
        _refuse_unconverted(path)
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{path / 'tokenizer.json'} is not a valid tokenizer: {error}") from error
    config = read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(path / "special_tokens_map.json")
    _follow_llama_class(backend, config, path)
    texts = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    named_tokens = {name: text for name, text in texts.items() if text is not None}
    _add_configured_tokens(backend, config, named_tokens, path)
    return backend, named_tokens, _read_chat_templates(path, config)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, it holds a {type(value).__name__}")
    return value


def decoder_types(backend: tokenizers.Tokenizer | NativeTokenizer) -> list[str]:
    """The types of the decoder's steps, in order; empty if tokens are joined with spaces."""
    steps = [json.loads(backend.decoder.__getstate__())] if backend.decoder is not None else []
    types = []
    while steps:
        step = steps.pop(0)
        if step["type"] == "Sequence":
            steps[:0] = step["decoders"]
        else:
            types.append(step["type"])
    return types


def _refuse_unconverted(path: Path) -> None:
    for name in _UNCONVERTED_FILES:
        if (path / name).is_file():
            raise CheckpointError(
                f"{path} has {name} but no tokenizer.json; convert it once with transformers: "
                f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
            )


def _token_text(value: Any) -> str | None:
    """The text of a token given as a string or a serialised `AddedToken`; None for anything else."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _follow_llama_class(backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Treat spaces as transformers' `LlamaTokenizer` does, which ignores the file's pipeline.

    This matters for older files, which put a space before each part of a text between special tokens.
    """
    if config.get("tokenizer_class") not in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return
    if "ByteLevel" in decoder_types(backend):
        return
    if read_json(path / "config.json").get("model_type") != "llama":
        return
    if config.get("add_prefix_space") is False:
        use_sentencepiece_pipeline(backend, "never")
    else:
        use_sentencepiece_pipeline(backend, "always" if config.get("legacy") else "first")


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named_tokens: Mapping[str, str], path: Path
) -> None:
    """Add the tokens that only tokenizer_config.json declares, or declares with other flags."""
    try:
        declared = {
            int(token_id): AddedToken(**token) for token_id, token in config.get("added_tokens_decoder", {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / 'tokenizer_config.json'}: bad added_tokens_decoder: {error}") from error
    backend.add_tokens([declared[token_id] for token_id in sorted(declared)])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(extra, list | dict):
        raise CheckpointError(f"{path / 'tokenizer_config.json'}: bad extra_special_tokens: {extra!r}")
    extra_texts = map(_token_text, extra.values() if isinstance(extra, dict) else extra)
    texts = dict.fromkeys([*named_tokens.values(), *(text for text in extra_texts if text is not None)])
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in texts if text not in known]
    )


def _read_chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: separate files take precedence over tokenizer_config.json."""
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(path.glob("additional_chat_templates/*.jinja"))}
    try:
        templates = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    except ValueError as error:
        raise CheckpointError(f"a chat template in {path} is not UTF-8 text: {error}") from error
    if templates:
        return templates
    value = config.get("chat_template") or read_json(path / "chat_template.json").get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
    except (KeyError, TypeError):
        templates = {}
    if not templates or not all(isinstance(text, str) for text in (*templates, *templates.values())):
        raise CheckpointError(f"{path}: the chat_template must be a string or a list of objects with name and template")
    return templates
