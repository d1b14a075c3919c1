"""One sequence of tokens: a prompt and its growing answer."""

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
"""The hash of all earlier blocks, then the block's own tokens. So a key's hash covers all blocks up to this one."""
hash_of = xxh3_128_digest


class Status(Enum):
    """A sequence's state. A waiting sequence holds no blocks and no row."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """The scheduler's state of a sequence.

        token_ids:   prompt ......... | answer ...... | pending (drawn on the device, not yet known here)
                     ^ num_computed moves from left to right: keys and values before it are in the cache,
                       or will be after the steps already submitted

    The scheduler plans the tokens from `num_computed` on. A new prompt, the rest of a chunked prompt, the token drawn
    last and a text to recompute after preemption differ only in how many tokens that is.
    """

    request: "Request"
    """The request that this sequence answers; set by the request."""
    index: int
    """The index of this answer in the request."""

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
        """The grammar that `params` ask for."""
        self.leader = leader
        """The first sequence of the same request, whose prompt blocks this one shares."""
        self.cache_salt = cache_salt
        """Only sequences with the same salt share blocks."""
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.row: int | None = None
        """The index in the model runner's arrays, while running."""
        self.block_tables: list[list[int]] = []
        """By group of layers: the blocks of its text, while running."""
        self.num_released: list[int] = []
        """By group: how many entries at the start of the table it does not hold, because no token will see them."""
        self.is_decoding = False
        """Whether its known text is computed. From then on the scheduler's arrays count computed and pending tokens."""
        self.num_computed = 0
        self.num_found_tokens = 0
        """Tokens found in the prefix cache when it was queued: an estimate of the tokens it need not compute."""
        self.num_pending = 0
        self.num_cached_tokens = 0
        """Prompt tokens that the first admission found in the prefix cache."""
        self.num_preemptions = 0
        self.is_patched = False
        """Whether hooks have changed what was computed for it."""
        self._block_keys: list[BlockKey] = []

    @property
    def num_tokens(self) -> int:
        """The number of known tokens."""
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one is drawn; for a waiting sequence, an estimate."""
        if self.status is Status.RUNNING:
            return len(self.token_ids) - self.num_computed
        if self.leader is not None and self.leader.status is Status.RUNNING:
            return len(self.token_ids) - min(self.leader.num_computed, self.num_prompt_tokens - 1)
        return len(self.token_ids) - self.num_found_tokens

    @property
    def num_output_tokens(self) -> int:
        """The number of known tokens of the answer."""
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
        """Whether it may use cached blocks.

        Prompt log-probabilities need every prompt position computed, once per request.
        """
        return self.params.prompt_logprobs is None or self.leader is not None

    @property
    def may_publish(self) -> bool:
        """Whether other sequences may use its blocks: no hook has changed what they hold."""
        return not self.is_patched and (self.leader is None or self.leader.may_publish)

    @property
    def is_held(self) -> bool:
        """Whether it must wait for its leader, so that the prompt is computed once and shared."""
        leader = self.leader
        return (
            leader is not None
            and self.num_output_tokens == 0
            and not leader.is_finished
            and leader.num_output_tokens == 0
        )

    def block_key(self, index: int, block_size: int) -> BlockKey:
        """The key under which sequences with the same prefix find full block `index`."""
        keys = self._block_keys
        num_known = len(keys)
        if index >= num_known:  # also makes the next keys, but not all keys of a long text at once
            end = max(index + 1, min(2 * num_known, len(self.token_ids) // block_size))
            parent = hash_of(keys[-1]) if keys else self.cache_salt
            keys += _make_keys(self.token_ids[num_known * block_size : end * block_size], parent, block_size)
        return keys[index]


def _make_keys(token_ids: List[int], parent: bytes, block_size: int) -> Iterator[BlockKey]:
    """The keys of the full blocks of `token_ids`, which follow the blocks with the hash `parent`."""
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
