"""A model runner without a model: its KV cache holds token ids, and the next token is a hash of the context.

Whatever the scheduler does wrong with blocks (a wrong table, a block given to two sequences, a stale prefix
hit, a block freed too early) changes some context, and so the tokens drawn from there on.
"""

from collections.abc import Sequence

from xxhash import xxh64_intdigest

from infinilm.engine.plan import PENDING_TOKEN, StepPlan, StepResult

VOCAB_SIZE = 40
STOP_ID = 0


def next_token(context: Sequence[int], seed: int) -> int:
    return xxh64_intdigest(bytes(context), seed) % VOCAB_SIZE


def generate_alone(prompt: list[int], *, seed: int, max_tokens: int, max_model_len: int) -> list[int]:
    """What a sequence must produce, whatever happens around it."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < max_model_len:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] == STOP_ID:
            break
    return tokens[len(prompt) :]


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
            for offset, token in enumerate(step.token_ids):
                is_pending = token == PENDING_TOKEN
                self.slots[self._slot(step.row, step.start + offset)] = (
                    self.last_token[step.row] if is_pending else token
                )
            if step.draws:
                end = step.start + len(step.token_ids)
                context = [self.slots[self._slot(step.row, position)] for position in range(end)]
                drawn[index] = next_token(context, self.seeds[step.row])
                self.last_token[step.row] = drawn[index]
        return StepResult(token_ids=drawn)

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.block_size] * self.block_size + position % self.block_size
