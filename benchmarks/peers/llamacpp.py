"""Runs the workloads with llama.cpp, for `bench --peer llama.cpp` and the scripts for CPUs.

Nothing here imports torch, so that the memory of the process is llama.cpp's own. This module calls llama.cpp's C
interface, which costs less per token than llama-cpp-python's classes and computes several streams at once.
"""

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from types import ModuleType

import numpy as np
import numpy.typing as npt

from benchmarks.peers import LLAMA_CPP, PEERS, check_installed
from infinilm.bench.measure import Run, Workload
from infinilm.errors import EngineError

PACKAGE = PEERS[LLAMA_CPP].package
REMEDY = (
    "build it for less than the CPU announces: "
    'CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON '
    '-DGGML_AVX512_BF16=ON" '
    f"pip install --force-reinstall --no-deps --no-cache-dir --no-binary {PACKAGE} {PACKAGE}"
)
"""For a virtual machine that reports instructions that it does not have, such as AMX."""
MAX_BATCH = 512
"""Tokens per call, which is llama.cpp's default."""
CACHE_PIECE = 256
"""A stream's cache is a multiple of this many tokens."""

Logits = npt.NDArray[np.float32]


class LlamaCpp:
    """A .gguf file loaded by llama.cpp, with its own defaults: mapped weights, a float16 cache, flash attention."""

    def __init__(self, path: Path, *, num_threads: int) -> None:
        check_installed(LLAMA_CPP)
        self._lib = lib = import_module("llama_cpp")
        logging.getLogger(PACKAGE).setLevel(logging.ERROR)
        self.name = LLAMA_CPP
        self.version = f"{lib.__version__} (llama-cpp-python)"
        self._num_threads = num_threads
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self._model:
            raise EngineError(f"llama.cpp can't load {path}")
        self.vocab_size: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self.max_len: int = lib.llama_model_n_ctx_train(self._model)

    def run(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Run:
        """Time a workload, in batches of its concurrency: greedy, every answer of full length."""
        run = Run()
        for start in range(0, len(prompts), workload.batch_size):
            self._run_batch(run, prompts[start : start + workload.batch_size], workload.output_len)
        return run

    def _run_batch(self, run: Run, prompts: Sequence[Sequence[int]], output_len: int) -> None:
        lengths = [len(prompt) for prompt in prompts]
        streams = range(len(prompts))
        with _Context(self, len(prompts), max(lengths) + output_len) as context:
            start_time = now = perf_counter()
            answers = []
            for stream, prompt in enumerate(prompts):
                logits = context.read(prompt, stream)
                answers.append([int(logits.argmax())])
                step_start, now = now, perf_counter()
                run.add_step(now - step_start, len(prompt), 1)
                run.ttfts.append(now - start_time)
            for step in range(output_len - 1):
                drawn = [answer[-1] for answer in answers]
                logits = context.decode(drawn, [length + step for length in lengths], streams, [True] * len(prompts))
                for answer, token in zip(answers, logits.argmax(axis=1).tolist(), strict=True):
                    answer.append(token)
                step_start, now = now, perf_counter()
                run.add_step(now - step_start, 0, len(prompts))
                run.gaps += [now - step_start] * len(prompts)
        run.seconds += now - start_time
        run.token_ids += answers

    def logits(self, token_ids: Sequence[int], rows: int) -> Logits:
        """The logits after each token of a text: `[tokens, vocab]`. `rows` tokens are computed at a time."""
        found = []
        with _Context(self, 1, len(token_ids)) as context:
            for start in range(0, len(token_ids), rows):
                piece = token_ids[start : start + rows]
                places = range(start, start + len(piece))
                found.append(context.decode(piece, places, [0] * len(piece), [True] * len(piece)).copy())
        return np.concatenate(found)

    def close(self) -> None:
        self._lib.llama_model_free(self._model)


class _Context:
    """An empty cache for some streams of up to `max_len` tokens, and a batch to fill."""

    def __init__(self, peer: LlamaCpp, num_streams: int, max_len: int) -> None:
        self._lib: ModuleType = peer._lib
        self._vocab_size = peer.vocab_size
        params = self._lib.llama_context_default_params()
        params.n_ctx = num_streams * -(-max_len // CACHE_PIECE) * CACHE_PIECE
        params.n_seq_max = num_streams
        params.n_batch = params.n_ubatch = MAX_BATCH
        params.n_threads = params.n_threads_batch = peer._num_threads
        self._context = self._lib.llama_init_from_model(peer._model, params)
        if not self._context:
            raise EngineError(f"llama.cpp can't make a context of {num_streams} × {max_len} tokens")
        self._batch = self._lib.llama_batch_init(MAX_BATCH, 0, 1)

    def __enter__(self) -> "_Context":
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)

    def read(self, prompt: Sequence[int], stream: int) -> Logits:
        """Compute a prompt. Returns the logits after its last token: `[1, vocab]`."""
        for start in range(0, len(prompt), MAX_BATCH):
            piece = prompt[start : start + MAX_BATCH]
            end = start + len(piece)
            wanted = [False] * (len(piece) - 1) + [end == len(prompt)]
            logits = self.decode(piece, range(start, end), [stream] * len(piece), wanted)
        return logits

    def decode(
        self, tokens: Sequence[int], places: Sequence[int], streams: Sequence[int], wanted: Sequence[bool]
    ) -> Logits:
        """Compute tokens at their positions in their streams.

        Returns the logits of the `wanted` tokens, which are valid until the next call.
        """
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, place, stream, is_wanted) in enumerate(zip(tokens, places, streams, wanted, strict=True)):
            batch.token[index] = token
            batch.pos[index] = place
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = stream
            batch.logits[index] = is_wanted
        if (code := self._lib.llama_decode(self._context, batch)) != 0:
            raise EngineError(f"llama.cpp failed to compute {len(tokens)} tokens: code {code}")
        if not any(wanted):
            return np.empty((0, self._vocab_size), np.float32)
        logits = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (sum(wanted), self._vocab_size))
