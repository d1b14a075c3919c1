"""Damages tiny quantised checkpoints at random, and says which are neither refused clearly nor read correctly.

    PYTHONPATH=.:tests python tests/loading/fuzz_quantized.py [--cases 300] [--seed 0]

A case is a checkpoint with a few changes of its configuration, tensors or bytes, and one way to load it. It must be
refused with a `CheckpointError` that names a tensor, a setting or the file, before any weight is loaded; or be loaded,
and then have the logits of the checkpoint before the change, unless the change was to numbers that may have any value.
Nobody can tell whether GPTQ's zeros are those of version 1 or 2 unless `sym` is true, so that is left out.
"""

import argparse
import json
import logging
import random
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from quantized_files import FORMATS, config_of, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from infinilm import InferEngine
from infinilm.errors import CheckpointError, EngineError
from infinilm.executor import rank_worker
from infinilm.loading.weights import load_weights as load
from infinilm.models import auto
from infinilm.models.quantization import choose_formats

TOKENS = list(range(3, 20))
GPU = torch.device("cuda", 0)
VALUES: list[Any] = [
    None,
    -1,
    0,
    1,
    3,
    4,
    8,
    16,
    24,
    32,
    64,
    128,
    2**40,
    0.5,
    "x",
    "",
    True,
    False,
    [],
    {},
    [32, 32],
    [1],
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
WAYS = ("default", "none", "packed")


def change_settings(rng: random.Random, config: dict[str, Any]) -> str:
    """Change a value of the `quantization_config`, however deep."""
    path, at = [], config["quantization_config"]
    while True:
        key = rng.choice([key for key in at if key != "checkpoint_format"] or list(at))
        path.append(key)
        if not isinstance(at[key], dict) or not at[key] or rng.random() < 0.2:
            break
        at = at[key]
    if rng.random() < 0.25:
        del at[key]
        return f"config: no {'.'.join(path)}"
    at[key] = rng.choice(VALUES)
    return f"config: {'.'.join(path)}={at[key]!r}"


def take_other_settings(rng: random.Random, config: dict[str, Any]) -> str:
    is_gptq = "sym" in config["quantization_config"]
    name = rng.choice([name for name in FORMATS if not (is_gptq and name.startswith("gptq"))])
    config["quantization_config"] = json.loads(json.dumps(config_of(name)))
    return f"config: that of {name}"


def change_tensor(rng: random.Random, weights: dict[str, Tensor]) -> str:
    """Change one tensor of a quantised layer: its name, shape, type or numbers."""
    ends = (
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "_scale",
        "_scale_inv",
        "_packed",
        "_zero_point",
        "_shape",
        "weight",
    )
    names = [name for name in weights if name.endswith(ends) and "_proj" in name]
    name = rng.choice(names)
    tensor = weights.pop(name)
    kind = rng.choice(
        ["drop", "rename", "move", "cut", "pad", "turn", "flatten", "cast", "numbers", "numbers", "twice"]
    )
    done = f"{kind} {name} {list(tensor.shape)} {tensor.dtype}".replace("torch.", "")
    if kind == "drop":
        return done
    if kind == "rename":
        weights[name + rng.choice("xs_")] = tensor
        return done
    if kind == "move":
        weights[name.replace("layers.0", "layers.7")] = tensor
        return done
    if kind == "turn" and tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
        kind = "flatten"  # nobody can tell a square matrix from the same one turned
    if kind == "twice":
        other = name.rpartition(".")[0] + rng.choice(
            [".weight", ".qweight", ".weight_packed", ".scales", ".weight_scale"]
        )
        weights[name] = tensor
        weights.setdefault(other, tensor.clone())
        return f"{done} also as {other}"
    if kind == "numbers":
        weights[name], what = change_numbers(rng, tensor)
        return f"{done}: {what}"
    weights[name] = change_form(rng, tensor, kind)
    return f"{done} -> {list(weights[name].shape)} {weights[name].dtype}"


def change_form(rng: random.Random, tensor: Tensor, kind: str) -> Tensor:
    plain = tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor
    dim = rng.randrange(max(1, tensor.dim()))
    if kind == "cast":
        return tensor.to(rng.choice(DTYPES))
    if kind == "cut" and tensor.dim():
        plain = plain.narrow(dim, 0, rng.choice([0, 1, tensor.shape[dim] // 2, tensor.shape[dim] - 1]))
    elif kind == "pad" and tensor.dim():
        plain = torch.cat((plain, plain.narrow(dim, 0, rng.choice([1, tensor.shape[dim]]))), dim)
    elif kind == "turn" and tensor.dim() == 2:
        plain = plain.t()
    else:
        plain = plain.flatten() if rng.random() < 0.5 else plain.unsqueeze(0)
    return plain.to(tensor.dtype).contiguous()


def change_numbers(rng: random.Random, tensor: Tensor) -> tuple[Tensor, str]:
    plain = tensor.clone() if tensor.dtype != torch.float8_e4m3fn else tensor.float()
    is_float = plain.is_floating_point()
    value = rng.choice([float("nan"), float("inf"), 0.0, -1.0, 1e30] if is_float else [0, -1, 2**31 - 1, 99])
    if is_float and value == 1e30:
        value = torch.finfo(tensor.dtype).max
    count = rng.choice([1, plain.numel()])
    flat = plain.flatten()
    flat[torch.randperm(flat.numel())[:count]] = value
    return flat.view(tensor.shape).to(tensor.dtype), f"{count} of {plain.numel()} = {value}"


def change_bytes(rng: random.Random, file: Path) -> str:
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    if rng.random() < 0.5:
        file.write_bytes(data[:at])
        return f"bytes: {at} of {len(data)}"
    at = rng.randrange(min(len(data), 4000))
    data[at] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return f"bytes: bit of byte {at} in the header"


class Watch:
    """Notes whether weights have begun to be loaded, and can keep matrices as a GPU does."""

    def __init__(self) -> None:
        self.has_begun, self.packs = False, False

        def load_weights(*args: Any, **options: Any) -> None:
            self.has_begun = True
            load(*args, **options)

        vars(rank_worker)["load_weights"] = load_weights
        vars(auto)["choose_formats"] = self._choose

    def _choose(self, checkpoint: Any, model_type: str, **settings: Any) -> Any:
        return choose_formats(checkpoint, model_type, **(settings | ({"device": GPU} if self.packs else {})))

    def logits(self, path: Path, way: str) -> Tensor:
        self.has_begun, self.packs = False, way == "packed"
        with InferEngine(path, device_type="cpu", quantization="none" if way == "none" else None) as engine:
            found = engine.forward(input_ids=[TOKENS], return_logits=True).logits
        assert found is not None
        return found[0]


def judge(watch: Watch, path: Path, way: str, expected: Tensor, done: str) -> tuple[str, str]:
    """What became of a case, and details."""
    try:
        found = watch.logits(path, way)
    except CheckpointError as error:
        names_it = any(word in str(error) for word in ("layers", "quantization_config", "quantised", "safetensors"))
        kind = "refused" if names_it and not watch.has_begun else "REFUSED LATE" if watch.has_begun else "UNCLEAR"
        return kind, str(error)
    except EngineError as error:
        return ("other numbers" if "numbers" in done and "no token can be drawn" in str(error) else "CRASHED"), str(
            error
        )
    except Exception:
        return "CRASHED", traceback.format_exc(limit=-4)
    if not found.isfinite().all():
        return ("other numbers" if "numbers" in done else "NOT FINITE"), ""
    if (found - expected).abs().max() < 0.02:
        return "same", ""
    return ("other numbers" if "numbers" in done else "OTHER"), f"{(found - expected).abs().max():.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every case")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rng, watch = random.Random(options.seed), Watch()
    torch.manual_seed(options.seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        stored = {name: write_checkpoint(name, Path(folder, name))[0] for name in FORMATS}
        expected = {name: watch.logits(path, "none") for name, path in stored.items()}
        target = Path(folder, "changed")
        target.mkdir()
        for index in range(options.cases):
            name, way = rng.choice(list(stored)), rng.choice(WAYS)
            config = json.loads((stored[name] / "config.json").read_text())
            weights = load_file(stored[name] / "model.safetensors")
            done = []
            for _ in range(rng.choice([1, 1, 1, 2])):
                draw = rng.random()
                if draw < 0.25:
                    done.append(change_settings(rng, config))
                elif draw < 0.35:
                    done.append(take_other_settings(rng, config))
                else:
                    done.append(change_tensor(rng, weights))
            (target / "config.json").write_text(json.dumps(config))
            save_file(weights, target / "model.safetensors")
            if rng.random() < 0.08:
                done.append(change_bytes(rng, target / "model.safetensors"))
            kind, details = judge(watch, target, way, expected[name], "; ".join(done))
            counts[kind] += 1
            if options.verbose or kind.isupper():
                print(f"{index} {kind}: {name}, {way}: {'; '.join(done)}\n    {details}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
