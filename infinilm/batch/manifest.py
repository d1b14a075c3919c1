"""The facts that a job was begun with, in a file beside its output. A resumed job with other facts is refused."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from infinilm import __version__
from infinilm.config import Config
from infinilm.errors import InvalidValueError
from infinilm.server.service import Service

ENGINE_SETTINGS = ("dtype", "quantization", "activation_bits", "kv_cache_dtype", "max_model_len", "seed")
"""The settings that change answers. The others may differ when a job is resumed."""
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")
OTHER_FILES = (".json", ".jinja", ".model", ".txt")

Facts = dict[str, Any]


class Manifest:
    """The manifest file. `facts` are compared when a job is resumed; the rest is for readers and for speed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: Facts = {}
        self.part_rows: int | None = None
        """Rows of a part, if the output is a folder of parts."""
        self.files: dict[str, list[Any]] = {}
        """By name: size, modification time, digest. A file is not read again if the first two are unchanged."""
        self.exists = path.exists()
        if self.exists:
            try:
                stored = json.loads(path.read_bytes())
                self.facts, self.part_rows, self.files = stored["facts"], stored["part_rows"], stored["files"]
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidValueError(f"{path} is damaged ({error!r}); start over with --restart") from None

    def save(self) -> None:
        stored = {"version": __version__, "part_rows": self.part_rows, "facts": self.facts, "files": self.files}
        unfinished = self.path.with_name(f"{self.path.name}.tmp")
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump(stored, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path)

    def check(self, facts: Facts, output: Path) -> None:
        """Refuse facts that differ from those at the job's beginning."""
        facts = json.loads(json.dumps(facts))
        for name in {**self.facts, **facts}:
            before, now = self.facts.get(name), facts.get(name)
            if before != now:
                raise InvalidValueError(
                    f"{output} was begun with another {name}: {_difference(before, now)}; give what it was begun with, "
                    "or start over with --restart"
                )

    def digest_files(self, model: Path) -> tuple[dict[str, str], dict[str, str]]:
        """The digests of a model's weights, and of its other files."""
        paths = [model] if model.is_file() else sorted(path for path in model.iterdir() if path.is_file())
        weights, others = {}, {}
        for path in paths:
            kind = path.suffix.lower()
            if kind in WEIGHTS:
                weights[path.name] = self._digest(path)
            elif kind in OTHER_FILES:
                others[path.name] = self._digest(path)
        return weights, others

    def _digest(self, path: Path) -> str:
        state = path.stat()
        key = [state.st_size, state.st_mtime_ns]
        known = self.files.get(path.name)
        if known is None or known[:2] != key:
            digest = xxh3_128()
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
            known = self.files[path.name] = [*key, digest.hexdigest()]
        return str(known[2])


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return ", ".join(f"{name} was {_short(before.get(name))} and is {_short(now.get(name))}" for name in names[:5])
    return f"it was {_short(before)} and is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if value is not None else "not given"
    return text if len(text) <= 60 else f"{text[:57]}…"


def collect_facts(manifest: Manifest, config: Config, model: Path, service: Service, job: Facts) -> Facts:
    """Everything that answers depend on. `job` has the input and the sampling."""
    weights, others = manifest.digest_files(model)
    tokenizer = service.tokenizer
    return {
        "model": service.model_name,
        "weights": weights,
        "chat template": _digest_text(repr((tokenizer.chat_template, tokenizer.tool_template))),
        "configuration or tokenizer": others,
        "setting": {name: getattr(config, name) for name in ENGINE_SETTINGS},
        "tool call parser": service.tool_format.name,
        **job,
    }


def _digest_text(text: str) -> str:
    digest = xxh3_128()
    digest.update(text.encode(errors="surrogatepass"))
    return digest.hexdigest()
