"""transformers on the same weights: the peer of `bench --peer transformers`, and the reference of `verify`."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from infinilm.bench.measure import Run, Workload
from infinilm.distributed.shard import WeightShard
from infinilm.engine.llm_engine import LLMEngine
from infinilm.errors import EngineError
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.weights import load_weights
from infinilm.outputs import RequestOutput, TokenLogprobs
from infinilm.sampling_params import SamplingParams

NUM_TOP = 20  # the most likely tokens that are compared at each position, besides the actual one
MAX_EXAMPLES = 5

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM orders\nWHERE ",
    "Q: What is 17 + 25?\nA:",
    "The three laws of thermodynamics are:\n1.",
    '{"name": "Ada", "born": 1815, "fields": [',
    "Der schnelle braune Fuchs springt über",
    "日本の首都は",
    "Привет! Как дела?",
    "Emoji: 🙂🚀🌍 and then",
    "To be, or not to be,",
    "<html>\n  <body>\n    <h1>",
    "a",
    "    \n\n\t  x",
    "1, 1, 2, 3, 5, 8, 13,",
)
QUESTIONS = (
    "What is gravity?",
    "Write a haiku about rain.",
    "How do I reverse a list in Python?",
    "¿Cuál es la capital de España?",
)


def check_installed() -> None:
    if find_spec("transformers") is None:
        raise EngineError("comparing with transformers needs it installed; install it with: pip install transformers")


class TransformersPeer:
    """A checkpoint loaded by transformers, with its own defaults: SDPA attention, a dynamic cache."""

    def __init__(self, path: Path, *, dtype: str, device: str) -> None:
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
        times = [perf_counter()]

        def record_time(ids: torch.Tensor, *_: Any) -> torch.Tensor:
            """A stopping criterion that never stops."""
            times.append(perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        with _quiet(transformers):
            output = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=settings,
                stopping_criteria=transformers.StoppingCriteriaList([record_time]),
            )
        steps = [after - before for before, after in pairwise(times)]
        if len(steps) != output_len:
            raise EngineError(f"transformers generated {len(steps)} tokens, not {output_len}")
        run.seconds += perf_counter() - times[0]
        run.token_ids += output[:, input_ids.shape[1] :].tolist()
        run.add_step(steps[0], input_ids.numel(), len(prompts))
        for seconds in steps[1:]:
            run.add_step(seconds, 0, len(prompts))
        run.ttfts += [steps[0]] * len(prompts)
        run.gaps += steps[1:] * len(prompts)


def _fill_from_gguf(path: Path, dtype: torch.dtype) -> Any:
    """Make transformers' model with the weights that we decode: its own GGUF reader needs more packages."""
    import transformers

    with closing(open_checkpoint(path)) as checkpoint:
        config = transformers.AutoConfig.for_model(**checkpoint.config)
        make_model: Any = transformers.AutoModelForCausalLM.from_config
        model = make_model(config, dtype=dtype)
        weights = {name: WeightShard.whole(weight) for name, weight in model.named_parameters()}
        load_weights(weights, checkpoint, show_progress=False)
    return model


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
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


@dataclass(slots=True)
class Agreement:
    tie_width: float  # tokens whose log-probabilities differ by no more than this may swap
    num_prompts: int = 0
    num_tokens: int = 0  # greedy tokens compared
    num_equal: int = 0
    num_ties: int = 0  # tokens that differ, with log-probabilities within `tie_width`
    num_wrong: int = 0
    num_logprobs: int = 0
    max_prompt_difference: float = 0.0
    max_output_difference: float = 0.0
    examples: list[str] = field(default_factory=list)  # the first tokens that differ, ties included


def compare(engine: LLMEngine, peer: TransformersPeer, *, max_tokens: int, tie_width: float) -> Agreement:
    """Generate greedily, then compare tokens and log-probabilities with the peer's for the same text.

    Given the same tokens so far, the peer's most likely token must be ours. So a text that agrees at every position is
    also the text that the peer would have generated.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    found = Agreement(tie_width)
    for output in engine.generate(_prompts(engine, max_tokens), params, use_tqdm=False):
        _compare_output(output, peer, found)
    return found


def _prompts(engine: LLMEngine, max_tokens: int) -> list[list[int]]:
    """Texts as they are and as chats; random token ids if the checkpoint has no tokenizer."""
    tokenizer = engine.tokenizer
    limit = max(1, engine.max_model_len - max_tokens)
    if tokenizer is None:
        random = Workload("verify", num_prompts=len(PROMPTS), input_len=min(32, limit), output_len=max_tokens)
        return random.prompts(engine.model_config.vocab_size, repeat=0)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    if tokenizer.chat_template is not None:
        prompts += [engine.chat_prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    return [prompt[:limit] for prompt in prompts]


def _compare_output(output: RequestOutput, peer: TransformersPeer, found: Agreement) -> None:
    num_prompt = len(output.prompt_token_ids)
    # Row i predicts the token after token i.
    expected = peer.logprobs([*output.prompt_token_ids, *output.token_ids])
    found.num_prompts += 1
    of_prompt = _largest((output.prompt_logprobs or [])[1:], expected, found)
    of_output = _largest(output.logprobs or [], expected[num_prompt - 1 :], found)
    found.max_prompt_difference = max(found.max_prompt_difference, of_prompt)
    found.max_output_difference = max(found.max_output_difference, of_output)
    best = expected[num_prompt - 1 : -1].max(dim=-1)
    for step, token_id in enumerate(output.token_ids):
        found.num_tokens += 1
        gap = float(best.values[step] - expected[num_prompt - 1 + step, token_id])
        if gap == 0.0:
            found.num_equal += 1
            continue
        is_tie = gap <= found.tie_width
        found.num_ties += is_tie
        found.num_wrong += not is_tie
        if len(found.examples) < MAX_EXAMPLES:
            found.examples.append(
                f"{'tie' if is_tie else 'different'}: token {step} of prompt {found.num_prompts} is {token_id}, "
                f"transformers takes {int(best.indices[step])}; they are {gap:.1e} apart"
            )


def _largest(positions: Sequence[TokenLogprobs | None], expected: torch.Tensor, found: Agreement) -> float:
    """The largest difference over the tokens reported at each position; `expected` is `[positions, vocab]`."""
    largest = 0.0
    for row, position in enumerate(positions):
        if position is None:
            continue
        ours = {**position.top, position.token_id: position.logprob}
        theirs = expected[row, list(ours)]
        difference = (torch.tensor(list(ours.values())) - theirs).abs().max().item()
        found.num_logprobs += len(ours)
        largest = max(largest, difference)
    return largest
