"""What each answer must be: made alone, one answer at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_reference, save
from tiny_tokenizer import save_tokenizer

from fuzz.specs import EOS_ID, MAX_MODEL_LEN, POISON_ID, VOCAB_SIZE, RequestSpec
from infinilm import LLM, RequestOutput, SamplingParams
from infinilm.debug import HookRegistry
from infinilm.engine.llm_engine import _mix
from infinilm.text.tokenizer import Tokenizer

NUM_NOISY_RUNS = 12


def make_checkpoint(directory: Path, kind: str = "llama-gqa") -> Path:
    """The tiny random model that all cases use; `kind` is one of `checkpoints.ARCHITECTURES`."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "intermediate_size": 128}  # all matrices can be quantised
    sizes["tie_word_embeddings"] = False  # or the head would have the row that is NaN
    model = make_reference(kind, **sizes, eos_token_id=EOS_ID, bos_token_id=0)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON_ID] = float("nan")
    save(model, directory)
    save_tokenizer(directory)
    return directory


class Oracle:
    """Runs one answer at a time in an engine without a prefix cache, and remembers what came."""

    def __init__(
        self, model: Path, *, tolerance: float = 1e-4, device: str = "cpu", quantization: str | None = None
    ) -> None:
        """With a `quantization` the native library alone runs the engines, and torch with the same matrices this one:
        a tolerance of 0 asks for the same bits."""
        self.model = model
        self.tolerance = tolerance
        """By which log-probabilities may differ, as other batches are rounded otherwise."""
        self.settings: dict[str, Any] = {"device": device, "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
        """Of every engine, lone or shared."""
        own: dict[str, Any] = {}
        if quantization is not None:
            self.settings |= {"quantization": quantization, "attention_backend": "native"}
            own = {"executor": "processes"}
        self._engine = LLM(model, num_kvcache_blocks=16, enable_prefix_caching=False, **self.settings, **own)
        self._answers: dict[tuple[int, int], RequestOutput] = {}

    def close(self) -> None:
        self._engine.exit()

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._engine.tokenizer is not None
        return self._engine.tokenizer

    def answer(self, spec: RequestSpec, index: int) -> RequestOutput:
        """The request with answer `index` as its only one."""
        key = (spec.number, index)
        if key not in self._answers:
            self._answers[key] = self._run(spec, index)
        return self._answers[key]

    def noisy_answers(self, spec: RequestSpec, index: int) -> Iterator[RequestOutput]:
        """The same with logits changed by as little as rounding does: near ties come out either way."""
        for seed in range(NUM_NOISY_RUNS):
            self._engine.set_hook_registry(_noise(seed, self.tolerance / 10))
            try:
                yield self._run(spec, index)
            finally:
                self._engine.set_hook_registry(None)

    def _run(self, spec: RequestSpec, index: int) -> RequestOutput:
        settings = {**spec.settings, "n": 1}
        if index > 0 and "seed" in settings:
            settings["seed"] = _mix(settings["seed"], index)
        [output] = self._engine.generate([spec.engine_prompt], SamplingParams(**settings), use_tqdm=False)
        while not self._engine.is_finished():  # a step may be in flight that was planned before the answer ended
            assert self._engine.step() == []
        stats = self._engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_cached_blocks == 0
        return output


def _noise(seed: int, size: float) -> HookRegistry:
    registry = HookRegistry()
    generator = torch.Generator().manual_seed(seed)

    def disturb(_name: str, logits: torch.Tensor, _layer: int) -> torch.Tensor:
        noise = torch.rand(logits.shape, generator=generator) * 2 - 1
        return logits + size * noise.to(logits.device)

    registry.register_hook("logits", disturb)
    return registry
