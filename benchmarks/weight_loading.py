"""Three ways to have packed weights in memory at a start, and what the size of pages costs a decode step.

    python -m benchmarks.weight_loading [MODEL.gguf] [--repeat 3]

- *pack*: the file's blocks are packed into large pages, as the engine does.
- *read*: as many bytes, packed before and kept in a file, are read into large pages and checked (xxh3).
- *map*: the same file is mapped and checked. Its pages are those of the system's cache, which are small.

A decode step then reads weights in large pages, or, as if they were mapped, in small ones. Each runs in a process of
its own, by turns. Times are CPU time of the whole process, so that other load on the machine disturbs less, with one
thread and files in the system's cache. Linux only.
"""

import argparse
import ctypes
import logging
import mmap
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np
from xxhash import xxh3_64_intdigest

from benchmarks.peers.engine_process import environment
from infinilm.cli.display import console, make_table
from infinilm.kernels.native import load
from infinilm.loading.gguf import GGUFFile
from infinilm.loading.sources import resolve

LOADS = ("pack", "read", "map")
STEPS = ("large pages", "small pages")
PR_SET_THP_DISABLE = 41
NUM_TOKENS, NUM_ROUNDS = 48, 4
SLICE_BYTES = 2**18


def pack(model: Path, _: Path) -> float:
    library = load()
    assert library is not None
    file = GGUFFile(model)
    quantised = [each for each in file.tensors.values() if len(each.shape) == 2 and each.ggml_type.block_elements > 1]
    start = process_time()
    matrices = []
    for tensor in quantised:
        rows, columns = tensor.shape
        matrices.append(library.Matrix(tensor.ggml_type.name, rows, columns))
        step = max(1, SLICE_BYTES * rows // tensor.num_bytes)
        for first in range(0, rows, step):
            places = np.arange(first, min(first + step, rows))
            blocks = file.read_blocks(tensor, (first, 0), (len(places), columns // tensor.ggml_type.block_elements))
            matrices[-1].load(blocks.reshape(len(places), -1), places)
    return process_time() - start


def read(_: Path, packed: Path) -> float:
    start = process_time()
    memory = mmap.mmap(-1, packed.stat().st_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    with packed.open("rb", buffering=0) as file:
        view, num_bytes = memoryview(memory), 0
        while count := file.readinto(view[num_bytes:]):
            num_bytes += count
    xxh3_64_intdigest(memory)
    return process_time() - start


def map_file(_: Path, packed: Path) -> float:
    start = process_time()
    with packed.open("rb") as file:
        xxh3_64_intdigest(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ))
    return process_time() - start


def step(model: Path, pages: str) -> float:
    if pages == "small pages" and ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        sys.exit("this system can't do without large pages")
    from infinilm import LLM, SamplingParams

    logging.getLogger("infinilm").setLevel(logging.ERROR)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    seconds = []
    with LLM(str(model), num_kvcache_blocks=32, max_model_len=256) as llm:
        for _ in range(NUM_ROUNDS):
            start = process_time()
            [output] = llm.generate([[5] * 8], params, use_tqdm=False)
            if output.error is not None:
                sys.exit(output.error)
            seconds.append((process_time() - start) / NUM_TOKENS)
    return min(seconds)


def run(way: str, model: Path, packed: Path) -> float:
    """Measure one way in a separate process."""
    command = [sys.executable, "-m", "benchmarks.weight_loading", str(model), "--way", way, "--packed", str(packed)]
    done = subprocess.run(command, env=environment(1), stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--way", choices=(*LOADS, *STEPS), help=argparse.SUPPRESS)
    parser.add_argument("--packed", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = resolve(options.model)
    if options.way in STEPS:
        print(step(model, options.way))
        return
    if options.way:
        print({"pack": pack, "read": read, "map": map_file}[options.way](model, options.packed))
        return
    with TemporaryDirectory(prefix="infinilm-") as folder:
        packed = Path(folder) / "packed"
        packed.write_bytes(np.random.default_rng(0).bytes(model.stat().st_size))
        found = [{way: run(way, model, packed) for way in (*LOADS, *STEPS)} for _ in range(options.repeat)]
    table = make_table(model.name, *LOADS, *STEPS)
    times = {way: median(each[way] for each in found) for way in (*LOADS, *STEPS)}
    table.add_row(
        "CPU time", *(f"{times[way]:.2f} s" for way in LOADS), *(f"{1e3 * times[way]:.2f} ms" for way in STEPS)
    )
    console().print(table)


if __name__ == "__main__":
    main()
