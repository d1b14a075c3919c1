"""Continuous batching by hand: requests join and leave a running batch, and share a pool of cache blocks.

Run it: `python examples/continuous_batching.py`

Every forward pass computes the new tokens of each request and draws its next token. For a request that has just joined,
the new tokens are its prompt; for the others, the last token. `LLM` does the same, with refinements.
"""

from collections import deque
from dataclasses import dataclass, field

from infinilm import InferEngine
from infinilm.cache import PagedKVCacheConfig

NUM_BLOCKS, BLOCK_SIZE = 5, 16
PROMPTS = {
    "The capital of France is": 12,
    "One, two, three,": 6,
    "The opposite of hot is": 4,
    "Roses are red, violets are blue, sugar is sweet, and so": 8,
    "Water boils at": 10,
}
"""The prompts, each with the number of tokens to add."""


@dataclass
class Request:
    """A growing text, and its blocks in the cache."""

    name: int
    tokens: list[int]
    final_len: int
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the finished text takes."""
        return -(-self.final_len // BLOCK_SIZE)


def step(engine: InferEngine, running: list[Request]) -> None:
    """Compute the new tokens of each request, and add a token to each."""
    new_tokens = [request.tokens[request.num_cached :] for request in running]
    longest = max(len(request.blocks) for request in running)
    output = engine.forward(
        input_ids=[token for tokens in new_tokens for token in tokens],  # [total], concatenated
        cache_lengths=[request.num_cached for request in running],
        input_lengths=[len(request.tokens) for request in running],  # cached and new
        block_tables=[request.blocks + [-1] * (longest - len(request.blocks)) for request in running],
        temperature=0,
    )
    for request, token in zip(running, output.output_ids.tolist(), strict=True):
        request.num_cached = len(request.tokens)
        request.tokens.append(token)


def main() -> None:
    """Answer all prompts together, then compare with answers computed one at a time."""
    engine = InferEngine("smollm2-135m", cache_config=PagedKVCacheConfig(NUM_BLOCKS, BLOCK_SIZE))
    tokenizer = engine.tokenizer
    assert tokenizer is not None  # the checkpoint has one
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    requests = [
        Request(name, list(prompt), len(prompt) + num_new)
        for name, (prompt, num_new) in enumerate(zip(prompts, PROMPTS.values(), strict=True))
    ]
    waiting, free_blocks = deque(requests), list(range(NUM_BLOCKS))
    running: list[Request] = []

    while waiting or running:
        while waiting and waiting[0].num_blocks <= len(free_blocks):
            request = waiting.popleft()
            request.blocks = [free_blocks.pop() for _ in range(request.num_blocks)]
            running.append(request)
        parts = [f"{r.name}: {'decode' if r.num_cached else f'prefill {len(r.tokens)}'}" for r in running]
        print(f"{', '.join(parts)}; {len(free_blocks)} blocks free")
        step(engine, running)
        for request in running:
            if len(request.tokens) == request.final_len:
                free_blocks += request.blocks
        running = [request for request in running if len(request.tokens) < request.final_len]

    for request, prompt in zip(requests, prompts, strict=True):
        alone = engine.generate(prompt, request.final_len - len(prompt), stop_on_eos=False, temperature=0)
        is_same = request.tokens == prompt + alone.token_ids[0]
        print(f"{request.name}: {tokenizer.decode(request.tokens)!r}, {'same' if is_same else 'NOT SAME'} alone")


if __name__ == "__main__":
    main()
