"""One stream of tokens: a prompt and the answer growing behind it."""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as List
from enum import Enum, auto
from typing import TYPE_CHECKING

from xxhash import xxh3_128_digest

from infinilm.outputs import FinishReason
from infinilm.sampling_params import SamplingParams
from infinilm.structured_output import Grammar

if TYPE_CHECKING:
    from infinilm.engine.request import Request

BlockKey = bytes
"""The hash of all blocks before, then the block's own tokens. The hash of the key is that of all blocks up to it."""
hash_of = xxh3_128_digest


class Status(Enum):
    """Where a sequence is. WAITING holds no blocks and no row."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """What the scheduler knows of a sequence.

        token_ids:   prompt ......... | answer ...... | pending (drawn on the device, not yet known here)
                     ^ num_computed moves through all of it: keys and values up to there are, or by the
                       steps already submitted will be, in the cache

    The scheduler closes the gap: a new prompt, a chunk's rest, the token drawn last, a text to be computed again after
    preemption are all just sizes of it.
    """

    request: "Request"
    """The request that this is an answer of; set by the request."""
    index: int
    """Which of the request's answers it is."""

    __slots__ = (
        "_block_keys",
        "arrival",
        "block_tables",
        "cache_salt",
        "finish_reason",
        "grammar",
        "index",
        "is_decoding",
        "is_patched",
        "leader",
        "num_cached_tokens",
        "num_computed",
        "num_found_tokens",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_released",
        "params",
        "request",
        "row",
        "seed",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        arrival: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        stop_ids: tuple[int, ...] = (),
        leader: "Sequence | None" = None,
        cache_salt: bytes = b"",
        grammar: Grammar | None = None,
    ) -> None:
        self.arrival = arrival
        """Unique and increasing: the order in which sequences are served."""
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.stop_ids = stop_ids
        """Tokens that end the answer."""
        self.grammar = grammar
        """What `params.structured` asks for."""
        self.leader = leader
        """The first sequence of the same request, whose prompt blocks this one shares."""
        self.cache_salt = cache_salt
        """Blocks are shared only among sequences with the same."""
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.row: int | None = None
        """The place in the model runner's arrays, while running."""
        self.block_tables: list[list[int]] = []
        """By group of layers: the blocks of its text, while running."""
        self.num_released: list[int] = []
        """By group: the entries at the table's beginning that it does not hold, because no token will see them."""
        self.is_decoding = False
        """Whether its text was computed in its row. From then on the scheduler counts what is computed and pending."""
        self.num_computed = 0
        self.num_found_tokens = 0
        """Tokens that were in the prefix cache when it was queued: an estimate of what it need not compute."""
        self.num_pending = 0
        self.num_cached_tokens = 0
        """Prompt tokens that the first admission found in the prefix cache."""
        self.num_preemptions = 0
        self.is_patched = False
        """Whether hooks have changed what was computed for it."""
        self._block_keys: list[BlockKey] = []

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one is drawn; of a waiting sequence, an estimate."""
        if self.status is Status.RUNNING:
            return len(self.token_ids) - self.num_computed
        if self.leader is not None and self.leader.status is Status.RUNNING:
            return len(self.token_ids) - min(self.leader.num_computed, self.num_prompt_tokens - 1)
        return len(self.token_ids) - self.num_found_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        """The answer so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended."""
        return self.status is Status.FINISHED

    @property
    def may_reuse_prefix(self) -> bool:
        """Prompt log-probabilities need every prompt position computed, once per request."""
        return self.params.prompt_logprobs is None or self.leader is not None

    @property
    def may_publish(self) -> bool:
        """Whether its blocks hold what its tokens make of them, so that others may use them."""
        return not self.is_patched and (self.leader is None or self.leader.may_publish)

    @property
    def is_held(self) -> bool:
        """Whether to wait for the leader, so that the prompt is computed once and shared."""
        leader = self.leader
        return (
            leader is not None
            and self.num_output_tokens == 0
            and not leader.is_finished
            and leader.num_output_tokens == 0
        )

    def block_key(self, index: int, block_size: int) -> BlockKey:
        """The key under which full block `index` can be found again by sequences with the same beginning."""
        keys = self._block_keys
        num_known = len(keys)
        if index >= num_known:  # those that are asked for next are made with it, but not all of a long text
            end = max(index + 1, min(2 * num_known, len(self.token_ids) // block_size))
            parent = hash_of(keys[-1]) if keys else self.cache_salt
            keys += _make_keys(self.token_ids[num_known * block_size : end * block_size], parent, block_size)
        return keys[index]


def _make_keys(token_ids: List[int], parent: bytes, block_size: int) -> Iterator[BlockKey]:
    """The keys of full blocks behind those with the hash `parent`."""
    all_ids = array("I", token_ids)
    content, num_bytes = all_ids.tobytes(), block_size * all_ids.itemsize
    for start in range(0, len(content), num_bytes):
        key = parent + content[start : start + num_bytes]
        parent = hash_of(key)
        yield key


def block_hashes(token_ids: List[int], cache_salt: bytes, block_size: int) -> list[bytes]:
    """The hashes of the blocks of a prompt that the prefix cache may hold, without the block of its last token."""
    num_tokens = (len(token_ids) - 1) // block_size * block_size
    return list(map(hash_of, _make_keys(token_ids[:num_tokens], cache_salt, block_size)))
