"""The same work done by transformers: the yardstick of `bench --peer`, the reference of `verify`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from infinilm.bench.measure import Run
from infinilm.bench.workloads import Workload
from infinilm.distributed.shard import WeightShard
from infinilm.errors import EngineError
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.weights import load_weights


class TransformersPeer:
    """A checkpoint loaded by transformers, with its own defaults: SDPA attention, a dynamic cache."""

    def __init__(self, path: Path, *, dtype: str, device: str) -> None:
        if find_spec("transformers") is None:
            raise EngineError("comparing with transformers needs it installed; pip install transformers")
        import transformers

        self.name = "transformers"
        self.version: str = transformers.__version__
        with _quiet(transformers):
            if path.is_dir():
                model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
            else:
                model = _fill_from_gguf(path, getattr(torch, dtype))
        self.model = model.eval().to(device)
        self._device = device

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of every token at each position after the first: `[tokens, vocab]` float32."""
        logits = self.model(torch.tensor([token_ids], device=self._device)).logits[0]
        return torch.log_softmax(logits.float(), dim=-1).cpu()

    def run(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Run:
        """Time a workload, in batches of its concurrency; all prompts are of one length, so nothing is padded."""
        run = Run()
        for start in range(0, len(prompts), workload.batch_size):
            self._run_batch(run, prompts[start : start + workload.batch_size], workload.output_len)
        return run

    @torch.inference_mode()
    def _run_batch(self, run: Run, prompts: Sequence[Sequence[int]], output_len: int) -> None:
        import transformers

        make_settings: Any = transformers.GenerationConfig
        input_ids = torch.tensor(prompts, device=self._device)
        settings = make_settings(max_new_tokens=output_len, do_sample=False, eos_token_id=None, pad_token_id=0)
        clock = _Clock()
        start_time = perf_counter()
        with _quiet(transformers):
            output = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=settings,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
        times = [start_time, *clock.times]
        steps = [after - before for before, after in pairwise(times)]
        if len(steps) != output_len:
            raise EngineError(f"transformers generated {len(steps)} tokens, not {output_len}")
        run.seconds += perf_counter() - start_time
        run.token_ids += output[:, input_ids.shape[1] :].tolist()
        run.add_step(steps[0], input_ids.numel(), len(prompts))
        for seconds in steps[1:]:
            run.add_step(seconds, 0, len(prompts))
        run.ttfts += [steps[0]] * len(prompts)
        run.gaps += steps[1:] * len(prompts)


class _Clock:
    """Asked after each token whether to stop: never, but it is a good moment to look at the time."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        self.times.append(perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _fill_from_gguf(path: Path, dtype: torch.dtype) -> Any:
    """Transformers' model with the weights as we decode them: its own reader of GGUF needs more packages."""
    import transformers

    checkpoint = open_checkpoint(path)
    try:
        config = transformers.AutoConfig.for_model(**checkpoint.config)
        make_model: Any = transformers.AutoModelForCausalLM.from_config
        model = make_model(config, dtype=dtype)
        weights = {name: WeightShard.whole(weight) for name, weight in model.named_parameters()}
        load_weights(weights, checkpoint, show_progress=False)
    finally:
        checkpoint.close()
    return model


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers from writing bars and advice between our lines."""
    logging = transformers.utils.logging
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
