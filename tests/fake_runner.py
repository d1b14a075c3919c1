"""A model runner without a model: its KV cache holds numbers that depend on a token and all before it, as keys
and values do, and the next token is a hash of the numbers in the context.

Whatever the scheduler does wrong with blocks (a wrong table, a block given to two sequences, a stale prefix
hit, a block freed too early) changes some context, and so the tokens drawn from there on.
"""

from collections.abc import Sequence

from xxhash import xxh32_intdigest

from infinilm.engine.plan import PENDING_TOKEN, StepPlan, StepResult

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
        drawn = {}
        for index, step in enumerate(plan.steps):
            self.tables[step.row] += step.new_blocks
            end = step.start + len(step.token_ids)
            for position, token in zip(range(step.start, end), step.token_ids, strict=True):
                previous = self.slots[self._slot(step.row, position - 1)] if position else 0
                known = self.last_token[step.row] if token == PENDING_TOKEN else token
                self.slots[self._slot(step.row, position)] = state_after(previous, known)
            if step.draws:
                context = [self.slots[self._slot(step.row, position)] for position in range(end)]
                drawn[index] = next_token(context, self.seeds[step.row])
                self.last_token[step.row] = drawn[index]
        return StepResult(token_ids=drawn)

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.block_size] * self.block_size + position % self.block_size
