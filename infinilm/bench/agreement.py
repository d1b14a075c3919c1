"""Whether this engine computes what transformers computes: tokens and log-probabilities over varied texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from infinilm.bench.transformers_peer import TransformersPeer
from infinilm.bench.workloads import Workload
from infinilm.engine.llm_engine import LLMEngine
from infinilm.outputs import RequestOutput, TokenLogprobs
from infinilm.sampling_params import SamplingParams

NUM_TOP = 20
"""Most likely tokens compared at each position, besides the one that is there."""
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


@dataclass(slots=True)
class Agreement:
    """What the comparison found."""

    tie_width: float
    """Two tokens whose log-probabilities are no further apart may come out in either order."""
    num_prompts: int = 0
    num_tokens: int = 0
    """Greedy tokens compared."""
    num_equal: int = 0
    num_ties: int = 0
    """Tokens that differ, but whose log-probabilities are within `tie_width`."""
    num_wrong: int = 0
    num_logprobs: int = 0
    max_prompt_difference: float = 0.0
    max_output_difference: float = 0.0
    examples: list[str] = field(default_factory=list)
    """The first tokens that differ, ties or not."""

    @property
    def max_difference(self) -> float:
        """The largest difference of two log-probabilities."""
        return max(self.max_prompt_difference, self.max_output_difference)


def compare(engine: LLMEngine, peer: TransformersPeer, *, max_tokens: int, tie_width: float) -> Agreement:
    """Generate greedily, then let the peer read prompt and answer and hold its numbers against ours.

    Given the same tokens so far the peer's most likely token must be ours, so a text that agrees at every
    position is also what the peer would have generated.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    found = Agreement(tie_width)
    for output in engine.generate(_prompts(engine, max_tokens), params, use_tqdm=False):
        _compare_output(output, peer, found)
    return found


def _prompts(engine: LLMEngine, max_tokens: int) -> list[list[int]]:
    """Texts as they are and as a chat; random token ids if the checkpoint knows no text."""
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
    # Row i tells what comes after token i.
    expected = peer.logprobs([*output.prompt_token_ids, *output.token_ids])
    found.num_prompts += 1
    found.max_prompt_difference = max(
        found.max_prompt_difference, _largest((output.prompt_logprobs or [])[1:], expected, found)
    )
    found.max_output_difference = max(
        found.max_output_difference, _largest(output.logprobs or [], expected[num_prompt - 1 :], found)
    )
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
