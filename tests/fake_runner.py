"""A model runner without a model: its KV cache holds numbers that depend on a token and all before it, as keys
and values do, and the next token is a hash of the numbers in the context.

Whatever the scheduler does wrong with blocks (a wrong table, a block given to two sequences, a stale prefix
hit, a block freed too early) changes some context, and so the tokens drawn from there on.
"""

from collections.abc import Sequence

from xxhash import xxh32_intdigest

from infinilm.engine.plan import NO_TOKEN, StepPlan, StepResult

VOCAB_SIZE = 40
STOP_ID = 0


def state_after(previous: int, token: int) -> int:
    """What a token leaves in the cache, given what the one before it left."""
    return xxh32_intdigest(f"{previous}/{token}".encode())


def next_token(states: Sequence[int | None], seed: int) -> int:
    return xxh32_intdigest(repr(states).encode(), seed) % VOCAB_SIZE


def generate_alone(prompt: list[int], *, seed: int, max_tokens: int, max_model_len: int) -> list[int]:
    """What a sequence must produce, whatever happens around it."""
    tokens: list[int] = []
    states: list[int] = []
    for token in prompt:
        states.append(state_after(states[-1] if states else 0, token))
    while len(tokens) < max_tokens and len(states) < max_model_len:
        tokens.append(next_token(states, seed))
        states.append(state_after(states[-1], tokens[-1]))
        if tokens[-1] == STOP_ID:
            break
    return tokens


class FakeRunner:
    """Executes plans in the order they are submitted, as a device would."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.tables: dict[int, list[int]] = {}
        self.seeds: dict[int, int] = {}
        self.last_token: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> StepResult:
        for row in plan.ended_rows:
            del self.tables[row]
        for start in plan.starts:
            assert start.row not in self.tables
            self.tables[start.row] = []
            self.seeds[start.row] = start.seed
        decoding = plan.decoding
        for row, block in zip(decoding.grown_rows.tolist(), decoding.new_blocks.tolist(), strict=True):
            self.tables[row].append(block)
        drawn = []
        for row, start in zip(decoding.rows.tolist(), decoding.starts.tolist(), strict=True):
            self._compute(row, start, [self.last_token[row]])
            drawn.append(self._draw(row, start + 1))
        for chunk in plan.chunks:
            self.tables[chunk.row] += chunk.new_blocks
            self._compute(chunk.row, chunk.start, chunk.token_ids)
            drawn.append(self._draw(chunk.row, chunk.start + len(chunk.token_ids)) if chunk.draws else NO_TOKEN)
        return StepResult(token_ids=drawn)

    def _compute(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        for position, token in enumerate(token_ids, start):
            previous = self.slots[self._slot(row, position - 1)] if position else 0
            self.slots[self._slot(row, position)] = state_after(previous, token)

    def _draw(self, row: int, end: int) -> int:
        context = [self.slots[self._slot(row, position)] for position in range(end)]
        self.last_token[row] = next_token(context, self.seeds[row])
        return self.last_token[row]

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.block_size] * self.block_size + position % self.block_size
