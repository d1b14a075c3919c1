"""Runs the workloads with OpenVINO GenAI, for `bench --peer openvino`. Nothing here imports torch."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.peers import OPENVINO, check_installed
from infinilm.bench.measure import Run, Workload
from infinilm.errors import EngineError
from infinilm.loading.gguf import GGUFFile

CACHE_GIB = 1
"""The size of InfiniLM's own cache on a CPU."""


class OpenVINO:
    """A .gguf file loaded by OpenVINO GenAI, with its continuous batching, whose steps can be timed."""

    def __init__(self, path: Path, *, num_threads: int) -> None:
        check_installed(OPENVINO)
        self._genai = genai = import_module("openvino_genai")
        self._tensor = import_module("openvino").Tensor
        self.name = OPENVINO
        self.version = str(genai.__version__).partition("-")[0]
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.enable_prefix_caching = False  # prompts must be computed
        header = GGUFFile(path)
        architecture = header.metadata["general.architecture"]
        self.max_len: int = header.metadata[f"{architecture}.context_length"]
        self.vocab_size = len(header.metadata["tokenizer.ggml.tokens"])
        header.close()
        scheduler.max_num_batched_tokens = self.max_len  # a prompt in one step
        try:
            self._engine = genai.ContinuousBatchingPipeline(
                str(path), scheduler, "CPU", {"INFERENCE_NUM_THREADS": num_threads}
            )
        except RuntimeError as error:
            raise EngineError(f"OpenVINO can't load {path}: {' '.join(str(error).split())[-300:]}") from error

    def run(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Run:
        """Time a workload, in batches of its concurrency: greedy, every answer of full length."""
        run = Run()
        for start in range(0, len(prompts), workload.batch_size):
            self._run_batch(run, prompts[start : start + workload.batch_size], workload.output_len)
        return run

    def _run_batch(self, run: Run, prompts: Sequence[Sequence[int]], output_len: int) -> None:
        config = self._genai.GenerationConfig(max_new_tokens=output_len, ignore_eos=True, do_sample=False)
        start_time = now = perf_counter()
        handles = [
            self._engine.add_request(index, self._tensor(np.array([prompt], np.int64)), config)
            for index, prompt in enumerate(prompts)
        ]
        answers: list[list[int]] = [[] for _ in prompts]
        while self._engine.has_non_finished_requests():
            self._engine.step()
            step_start, now = now, perf_counter()
            num_prompt_tokens = num_drawn = 0
            for handle, answer, prompt in zip(handles, answers, prompts, strict=True):
                new = list(handle.read()[0].generated_ids) if handle.can_read() else []
                num_drawn += len(new)
                if new and not answer:
                    run.ttfts.append(now - start_time)
                    num_prompt_tokens += len(prompt)
                elif new:
                    run.gaps += [(now - step_start) / len(new)] * len(new)
                answer.extend(new)
            run.add_step(now - step_start, num_prompt_tokens, num_drawn)
        run.seconds += now - start_time
        run.token_ids += answers
