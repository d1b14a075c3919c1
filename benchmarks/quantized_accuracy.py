"""How near quantised checkpoints are to the unquantised model, in every format, and to other libraries' results.

    python -m benchmarks.quantized_accuracy [MODEL.gguf] [--device cpu] [--max-len 512] [--rows 512] [--formats NAME …]

The unquantised model is the dense float32 model of the file's dequantised weights: no dense weights can be had, so the
figures are those of rounding a 4-bit model once more. From it checkpoints in every format are written into a temporary
directory (`quantize_checkpoint.py`, `quantize_gguf.py`: to the nearest, without calibration). The engine runs each with
its defaults; on a GPU `dtype` is bfloat16. The columns:

- `bits`: of a quantised weight on disk, scales included. `mxfp4` has its own, though it is stored dense.
- `kept as`: the format of most matrices in memory.
- `mean KL`, with its standard error: the Kullback-Leibler divergence of the whole vocabulary's distribution from the
  unquantised model's in float32, in nats, at all positions of the texts of `cpu_texts.py`.
- `perplexity` of the texts, and how far it is from the unquantised model's.
- `same top`: positions at which the most likely token is the unquantised model's.
- `logits`: the largest difference from transformers' logits, computed in float32 with the weights as the library in
  `reference` decodes them from the same file. There this engine computes in float32, too.

A library that is not installed is left out. `--rows` is how many tokens are computed at a time.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cpu_texts import read_texts
from benchmarks.distance import Distance, Floats, Ours
from benchmarks.gpu_common import write_json
from benchmarks.quantize_checkpoint import (
    DENSE,
    REST,
    Format,
    encode_mxfp4,
    formats,
    is_quantizable,
    largest_group,
    write_checkpoint,
)
from benchmarks.quantize_gguf import WRITERS, write_gguf
from infinilm import LLM
from infinilm.errors import InfinilmError
from infinilm.loading.checkpoint import Checkpoint, open_checkpoint
from infinilm.loading.sources import resolve
from infinilm.models import ModelConfig
from infinilm.models.quantization import choose_formats

MADE_WHILE_LOADING = ("q8", "q4", "fp8", "int4")
"""Values of `quantization`."""
TEXT = "story"
"""The text on which logits are compared with those of transformers."""
HEADER = ("format", "bits", "kept as", "mean KL", "perplexity", "change", "same top", "logits", "reference")


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint to measure, and the settings to load it with."""

    name: str
    write: Callable[[], Path]
    settings: dict[str, Any] = field(default_factory=dict)
    format: Format | None = None
    """The format, if it is one of `quantize_checkpoint`."""


class Bench:
    """One model, its texts, and the unquantised model's logits."""

    def __init__(self, path: Path, folder: Path, device: str, max_len: int, rows: int) -> None:
        self.path, self.folder, self.device, self.rows = path, folder, device, rows
        self.settings: dict[str, Any] = {"device": device, "max_model_len": max_len, "max_num_seqs": 1}
        with LLM(path, **self.settings) as engine:
            self.texts = read_texts(engine, max_len)
        self.dense = folder / "dense"
        with closing(open_checkpoint(path)) as source:
            write_checkpoint(source, DENSE, self.dense)
            self.group = largest_group(source)
        self.exact = Distance()
        with LLM(self.dense, dtype="float32", **self.settings) as engine:
            for name, token_ids in self.texts.items():
                logits = Ours(engine).logits(token_ids[:-1], rows)
                self.exact.add(logits, logits, np.array(token_ids[1:]))
                np.save(folder / f"{name.replace('/', '-')}.npy", logits)

    def cases(self) -> Iterator[Case]:
        yield Case("dense", lambda: self.dense)
        for name, format in formats(self.group).items():
            yield Case(name, lambda name=name, format=format: self._write(name, format), format=format)  # type: ignore[misc]
        blocks = formats(self.group)["fp8-blocks"]
        yield Case("fp8-blocks, quantization=q8", lambda: self._write("fp8-blocks", blocks), {"quantization": "q8"})
        for name in WRITERS:
            yield Case(f"gguf-{name}", lambda name=name: self._write_gguf(name))  # type: ignore[misc]
        yield Case("gguf-as-it-is", lambda: self.path)
        for name in MADE_WHILE_LOADING:
            yield Case(f"quantization={name}", lambda: self.dense, {"quantization": name})
        yield Case("kv_cache_dtype=fp8", lambda: self.dense, {"kv_cache_dtype": "fp8"})

    def _write(self, name: str, format: Format) -> Path:
        with closing(open_checkpoint(self.dense)) as source:
            write_checkpoint(source, format, self.folder / name, self.dense / REST)
        return self.folder / name

    def _write_gguf(self, name: str) -> Path:
        target = self.folder / f"{name}.gguf"
        write_gguf(self.path, name, target)
        return target

    def run(self, case: Case) -> dict[str, Any]:
        """The figures of a case, or the reason if it is refused."""
        start_time = perf_counter()
        try:
            path = case.write()
            dtype = "auto" if self.device == "cpu" else "bfloat16"
            own = {"dtype": dtype, **self.settings, **case.settings}
            found = Distance()
            with LLM(path, **own) as engine:
                for name, token_ids in self.texts.items():
                    expected = np.load(self.folder / f"{name.replace('/', '-')}.npy", mmap_mode="r")
                    logits = Ours(engine).logits(token_ids[:-1], self.rows)
                    found.add(expected, logits, np.array(token_ids[1:]))
                    if name == TEXT:
                        first = logits
        except InfinilmError as error:
            return {"refused": str(error)}
        report: dict[str, Any] = found.summary(self.exact)
        report |= self._describe(path, own)
        if case.format is not None and case.format.bits is not None:
            report["bits"] = case.format.bits
        if not case.settings:
            report |= self._compare(
                case, path, first if self.device == "cpu" and report["kept_as"] == "dense" else None
            )
        self._remove(path)
        return report | {"seconds": perf_counter() - start_time}

    def _describe(self, path: Path, own: dict[str, Any]) -> dict[str, Any]:
        """The bits of a weight on disk, and the format of most matrices in memory."""
        with closing(open_checkpoint(path)) as checkpoint:
            asked = {key: own.get(key) for key in ("quantization", "dtype")}
            model_type = ModelConfig.from_dict(checkpoint.config).model_type
            kept = choose_formats(checkpoint, model_type, device=torch.device(self.device), **asked)  # type: ignore[arg-type]
            names = {name for name, shape in checkpoint.shapes().items() if is_quantizable(name, shape)}
            names.discard("lm_head.weight")
            count = sum(torch.Size(checkpoint.shapes()[name]).numel() for name in names)
            most = Counter(kept.by_name.get(name, "dense") for name in names).most_common(1)[0][0]
        return {"bits": 8 * _stored_bytes(path, names) / count, "kept_as": most}

    def _compare(self, case: Case, path: Path, found: Floats | None) -> dict[str, Any]:
        """The largest difference of a logit from transformers' with the library's own decoded weights.

        `found` are the logits of `TEXT` if they have been computed in float32.
        """
        library = find_library(path, case.format)
        if library is None:
            return {}
        token_ids = self.texts[TEXT][:-1]
        if found is None:
            with LLM(path, dtype="float32", **self.settings) as engine:
                found = Ours(engine).logits(token_ids, self.rows)
        name, read = library
        with torch.inference_mode():
            for own, values in read().items():
                self.reference.get_parameter(own).copy_(values)
            expected = self.reference(torch.tensor([token_ids])).logits[0].float().numpy()
        return {"logit_difference": float(np.abs(found - expected).max()), "reference": name}

    @cached_property
    def reference(self) -> Any:
        """Transformers' model of the unquantised weights."""
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(self.dense, dtype=torch.float32)

    def _remove(self, path: Path) -> None:
        if path in (self.dense, self.path):
            return
        for file in path.glob("*") if path.is_dir() else [path]:
            file.unlink()


def _stored_bytes(path: Path, names: set[str]) -> int:
    """The bytes of all tensors of these matrices: codes, scales and zeros."""
    if path.is_file():
        from infinilm.loading.gguf import GGUFFile

        with closing(GGUFFile(path)) as file:
            return sum(
                tensor.num_bytes
                for name, tensor in file.tensors.items()
                if len(tensor.shape) == 2 and name not in ("token_embd.weight", "output.weight")
            )
    from safetensors import safe_open

    layers = {name.removesuffix("weight") for name in names}
    total = 0
    for part in path.glob("*.safetensors"):
        with safe_open(part, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if any(name.startswith(layer) for layer in layers) and not name.endswith(".bias"):
                    total += opened.get_tensor(name).nbytes
    return total


Weights = dict[str, Tensor]


def find_library(path: Path, format: Format | None) -> tuple[str, Callable[[], Weights]] | None:
    """The library that decodes a checkpoint, and its weights. None if the library is not installed."""
    dense = path.parent / "dense"
    found: tuple[str, Callable[[], Weights]]
    if path.is_file():
        found = "gguf", lambda: read_by_gguf(path)
    elif format is None:
        found = "transformers", dict
    elif format.config is None:
        found = "transformers", lambda: read_mxfp4(dense)
    elif format.config["quant_method"] == "gptq":
        found = "values before packing", lambda: read_before_packing(dense, format)
    else:
        found = "compressed-tensors", lambda: read_by_compressed_tensors(path, format)
    packages = {"transformers", found[0].replace("-", "_")} - {"values before packing"}
    return found if all(map(find_spec, packages)) else None


def _layers(path: Path) -> Iterator[tuple[str, Checkpoint]]:
    with closing(open_checkpoint(path)) as checkpoint:
        for name, shape in checkpoint.shapes().items():
            if is_quantizable(name, shape):
                yield name, checkpoint


def read_before_packing(dense: Path, format: Format) -> Weights:
    return {name: format.write(source.read(name))[1] for name, source in _layers(dense)}


def read_mxfp4(dense: Path) -> Weights:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = {}
    for name, source in _layers(dense):
        blocks, scales = encode_mxfp4(source.read(name))
        found[name] = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()
    return found


def read_by_gguf(path: Path) -> Weights:
    """Weights decoded by gguf. Names and the order of rows are this engine's, which `infinilm verify` checks."""
    from gguf import GGMLQuantizationType, GGUFReader, dequantize

    from infinilm.loading import gguf_checkpoint

    decoded = {
        tensor.name: dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        for tensor in GGUFReader(path).tensors
        if len(tensor.shape) == 2
    }
    found = {}
    with closing(open_checkpoint(path)) as checkpoint:
        assert isinstance(checkpoint, gguf_checkpoint.GGUFCheckpoint)
        for name, stored in checkpoint._tensors.items():
            if is_quantizable(name, stored.shape):
                values = decoded[stored.name].reshape(stored.shape)
                head_dim = checkpoint._find_permutation(name, 0, len(values))
                ordered = values if head_dim is None else gguf_checkpoint._unpermute(values, head_dim)
                found[name] = torch.from_numpy(ordered.copy())
    return found


def read_by_compressed_tensors(path: Path, format: Format) -> Weights:
    from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.entrypoints.convert import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from safetensors.torch import load_file

    assert format.config is not None
    config, is_awq = format.config, format.config["quant_method"] == "awq"
    kind = FloatQuantizationCompressor
    if is_awq:
        size = config["group_size"]
        settings = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": False}
        converter = AutoAWQConverter(
            bits=4, group_size=size, zero_point=True, version="gemm", ignore=[], targets=["re:.*"]
        )
    elif config["quant_method"] == "fp8":
        size = config.get("weight_block_size")
        settings = {"num_bits": 8, "type": "float", "strategy": "block" if size else "tensor", "block_structure": size}
    else:
        settings = config["config_groups"]["group_0"]["weights"]
    if settings["type"] == "int":
        kind = PackedQuantizationCompressor
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings))
    found = {}
    for file in path.glob("layer*.safetensors"):
        layers: dict[str, Weights] = {}
        for name, tensor in load_file(file).items():
            layer, _, end = name.rpartition(".")
            layers.setdefault(layer, {})[end.removesuffix("_inv")] = tensor
        for layer, tensors in layers.items():
            if not layer.endswith("_proj"):
                continue
            if is_awq:
                tensors = converter.process({f"layer.{end}": tensor for end, tensor in tensors.items()})  # noqa: PLW2901
                tensors = {end.removeprefix("layer."): tensor for end, tensor in tensors.items()}  # noqa: PLW2901
            tensors["weight_scale"] = tensors["weight_scale"].float()
            found[f"{layer}.weight"] = kind.decompress(tensors, scheme)["weight"]
    return found


def line(name: str, figures: dict[str, Any]) -> str:
    if "refused" in figures:
        return f"| {name} | refused: {figures['refused']} |"
    cells = [
        name,
        "" if figures["bits"] == 32 else f"{figures['bits']:.2f}",
        figures["kept_as"],
        f"{figures['mean_kl']:.2e} ± {figures['mean_kl_error']:.0e}",
        f"{figures['perplexity']:.3f}",
        f"{figures['perplexity_change']:+.2%}",
        f"{figures['same_top']:.2%}",
        f"{figures['logit_difference']:.0e}" if "logit_difference" in figures else "",
        figures.get("reference", ""),
    ]
    return f"| {' | '.join(cells)} |"


def main(args: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a .gguf file; the embedded model by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-len", type=int, default=512, help="tokens of each text at most")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--formats", nargs="+", metavar="NAME", help="those of the table to measure; all by default")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; a temporary one by default")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(args)
    path = resolve(options.model)
    with TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(path, Path(folder), options.device, options.max_len, options.rows)
        cases = [case for case in bench.cases() if options.formats is None or case.name in options.formats]
        if options.formats and len(cases) < len(set(options.formats)):
            raise SystemExit(f"--formats: known are {', '.join(case.name for case in bench.cases())}")
        print(
            f"{path.name} on {options.device}: {len(bench.exact.divergences):,} positions, perplexity "
            f"{bench.exact.perplexity:.3f} unquantised; INT4 in groups of {bench.group}\n"
        )
        print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
        report: dict[str, Any] = {"model": path.name, "device": options.device, "formats": {}}
        for case in cases:
            report["formats"][case.name] = bench.run(case)
            print(line(case.name, report["formats"][case.name]), flush=True)
    write_json(options.json, report)


if __name__ == "__main__":
    main()
