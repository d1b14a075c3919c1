"""A model runner without a model: its KV cache holds numbers that depend on a token and all before it, as keys
and values do, and the next token is a hash of the numbers in the context.

Whatever the scheduler does wrong with blocks (a wrong table, a block given to two sequences, a stale prefix
hit, a block freed too early) changes some context, and so the tokens drawn from there on.

Each group of layers has a cache of its own; with a window its layers see, and the next token depends on, the last
`window` tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

from narrow import present
from xxhash import xxh32_intdigest

from infinilm.executor.step_io import LAST_TOKEN, NO_TOKEN, StepInput, StepOutput

VOCAB_SIZE = 40
STOP_ID = 0


def state_after(previous: int, token: int) -> int:
    """What a token leaves in the cache, given what the one before it left."""
    return xxh32_intdigest(f"{previous}/{token}".encode())


def next_token(contexts: Sequence[Sequence[int | None]], seed: int) -> int:
    """`contexts`: by group, the states that the last token sees."""
    return xxh32_intdigest(repr(contexts).encode(), seed) % VOCAB_SIZE


def generate_alone(
    prompt: list[int], *, seed: int, max_tokens: int, max_model_len: int, windows: Sequence[int | None] = (None,)
) -> list[int]:
    """What a sequence must produce, whatever happens around it."""
    tokens: list[int] = []
    states: list[list[int]] = [[] for _ in windows]

    def compute(token: int) -> None:
        for own, window in zip(states, windows, strict=True):
            own.append(state_after(own[-1] if own and window != 1 else 0, token))

    for token in prompt:
        compute(token)
    while len(tokens) < max_tokens and len(states[0]) < max_model_len:
        tokens.append(next_token([own[-(window or 0) :] for own, window in zip(states, windows, strict=True)], seed))
        compute(tokens[-1])
        if tokens[-1] == STOP_ID:
            break
    return tokens


class FakeRunner:
    """Executes plans in the order they are submitted, as a device would."""

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self.block_size = block_size
        self.windows = windows
        self.slots: list[list[int | None]] = [[None] * (num_blocks * block_size) for _ in windows]
        self.tables: dict[int, list[list[int]]] = {}
        self.seeds: dict[int, int] = {}
        self.last_token: dict[int, int | None] = {}  # None: the row had drafts, so only the engine knows it

    def submit(self, step: StepInput) -> StepOutput:
        for row in step.ended_rows:
            del self.tables[row]
        for start in step.starts:
            assert start.row not in self.tables
            self.tables[start.row] = [[] for _ in self.windows]
            self.seeds[start.row] = start.seed
        updates = step.blocks
        for group, row, place, block in zip(updates.groups, updates.rows, updates.places, updates.blocks, strict=True):
            assert len(self.tables[row][group]) == place
            self.tables[row][group].append(int(block))
        drawn = []
        decoding = step.decoding
        for row, start, line in zip(
            decoding.rows.tolist(), decoding.starts.tolist(), decoding.token_ids.tolist(), strict=True
        ):
            token_ids = [token_id for token_id in line if token_id != NO_TOKEN]
            if token_ids[0] == LAST_TOKEN:
                token_ids[0] = self.last_token[row]
            assert token_ids[0] is not None
            assert self.last_token[row] in (None, token_ids[0])
            self._compute(row, start, token_ids)
            drawn += [self._draw(row, start + 1 + i) for i in range(len(token_ids))]
            if len(token_ids) > 1:
                self.last_token[row] = None
        for chunk in step.chunks:
            self._compute(chunk.row, chunk.start, chunk.token_ids)
            if chunk.samples:
                drawn.append(self._draw(chunk.row, chunk.start + len(chunk.token_ids)))
        if step.run.max_steps > 1:
            return self._go_on(step, drawn)
        if step.num_samples == step.num_rows and not decoding.has_drafts:
            return StepOutput(drawn)
        return StepOutput.of(step.accept(drawn))

    def _go_on(self, step: StepInput, drawn: list[int]) -> StepOutput:
        """Decode for more steps, any number of those allowed, after one in which rows drew these tokens."""
        num_steps = 1 + xxh32_intdigest(repr(drawn).encode()) % step.run.max_steps
        lines = [drawn]
        while len(lines) < num_steps and not any(step.run.is_stop[: token + 1][token:].any() for token in lines[-1]):
            ends = (step.decoding.starts + len(lines)).tolist()
            rows = step.decoding.rows.tolist()
            for row, end, token in zip(rows, ends, lines[-1], strict=True):
                self._compute(row, end, [token])
            lines.append([self._draw(row, end + 1) for row, end in zip(rows, ends, strict=True)])
        gained = [list(tokens) for tokens in zip(*lines, strict=True)]
        return replace(StepOutput.of(gained), num_steps=len(lines))

    def _compute(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        for group, (slots, window) in enumerate(zip(self.slots, self.windows, strict=True)):
            for position, token in enumerate(token_ids, start):
                previous = present(slots[self._slot(group, row, position - 1)]) if position and window != 1 else 0
                slots[self._slot(group, row, position)] = state_after(previous, token)

    def _draw(self, row: int, end: int) -> int:
        contexts = [
            [slots[self._slot(group, row, position)] for position in range(max(end - (window or end), 0), end)]
            for group, (slots, window) in enumerate(zip(self.slots, self.windows, strict=True))
        ]
        token = self.last_token[row] = next_token(contexts, self.seeds[row])
        return token

    def _slot(self, group: int, row: int, position: int) -> int:
        return self.tables[row][group][position // self.block_size] * self.block_size + position % self.block_size
