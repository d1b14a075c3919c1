"""`GenerationMixin.generate`: a token-by-token loop over any function that computes the next token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinilm.checks import check_flag, check_integer, plain_number
from infinilm.errors import InvalidTypeError
from infinilm.generation.arrays import IntArray, read_rows
from infinilm.generation.output import GenerationOutput, GenerationTimings, Streamer
from infinilm.sampling.uniform import UniformValues, check_uniform


class Decoder(Protocol):
    """The tokenizer interface that `generate` needs."""

    def decode(self, ids: Any) -> str:
        """The text of token ids."""


class GenerationConfig(Protocol):
    """The model configuration that `generate` needs."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    def eos_token_id(self) -> int | list[int] | None:
        """The token or tokens that end an answer."""


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """The input of one step."""

    text: Tensor
    """`[batch, length]` int64 on the CPU: the prompts, and the answers so far."""
    num_computed: int
    """The tokens of each row that earlier steps computed: 0 in the first step, then all except the last."""
    sampling: UniformValues
    """`temperature`, `top_k`, `top_p` and `random_val`, `[batch]` each."""

    @property
    def new_ids(self) -> Tensor:
        """`[batch, new]`: the tokens to compute."""
        return self.text[:, self.num_computed :]


NextTokens = Callable[[GenerationStep], Sequence[int]]
"""Computes a step and returns the next token of each row."""


class GenerationMixin:
    """Adds `generate` to a class.

    The class has a `config`, may have a `tokenizer`, and implements `_start_generation`, which computes the steps.
    """

    config: GenerationConfig
    tokenizer: Decoder | None = None

    def _start_generation(self, batch_size: int, max_len: int) -> NextTokens:
        """Prepare for `batch_size` rows of up to `max_len` tokens, prompt and answer. The last token is never computed.

        Returns the function that computes the steps, in order. That function should hold the state between steps, such
        as a cache, so that calls of `generate` are independent. Raises `PromptTooLongError` if the text does not fit.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement _start_generation to generate")

    def _eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer. Override this if the checkpoint names more of them than the `config`."""
        ids = self.config.eos_token_id
        listed = ids if isinstance(ids, list) else [ids]
        return tuple(each for each in listed if each is not None and each < self.config.vocab_size)

    def generate(
        self,
        input_ids: Any,
        max_new_tokens: int,
        tokenizer: Decoder | None = None,
        stop_on_eos: bool = True,
        *,
        temperature: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 50,
        top_p: float | Sequence[float] = 1.0,
        seed: int | None = None,
        streamer: Streamer | Callable[[list[int]], object] | None = None,
    ) -> GenerationOutput:
        """Continue the prompts `input_ids` `[batch, seq]` or `[seq]`: a tensor, an array or lists.

        Rows that draw an end token are padded with the first end token while the other rows continue. Without
        `stop_on_eos`, or if the model has no end token, all rows get `max_new_tokens`. `temperature` (0 is greedy),
        `top_k` (0 or less: no limit) and `top_p` are one number, or one per row. A row's draws depend on the `seed` and
        on its index in the batch; without a seed they differ between calls.

        `tokenizer` decodes the answers. It is any object with `decode(ids)`; by default it is the model's own.
        `streamer` is a transformers streamer (`put` gets the prompt, then each step's tokens; `end` is called last), or
        a function that gets the list of each step's tokens, one per row, including padding.
        """
        prompts = read_rows("input_ids", input_ids, self.config.vocab_size)
        max_new_tokens, stop_on_eos, seed = map(plain_number, (max_new_tokens, stop_on_eos, seed))
        check_integer("max_new_tokens", max_new_tokens, low=1)
        check_flag("stop_on_eos", stop_on_eos)
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise InvalidTypeError(f"tokenizer={tokenizer!r} must have a method decode(ids)")
        draws = _Draws(len(prompts), seed)
        sampling = check_uniform(len(prompts), temperature, top_k, top_p, 0.0)
        if not (streamer is None or callable(streamer) or isinstance(streamer, Streamer)):
            raise InvalidTypeError(
                f"streamer={streamer!r} must have the methods put and end, or be a function of the new token ids"
            )
        next_tokens = self._start_generation(len(prompts), prompts.shape[1] + max_new_tokens)
        rows = _Rows(prompts, max_new_tokens, self._eos_token_ids() if stop_on_eos else ())
        if not isinstance(streamer, Streamer):
            return rows.output(_run(next_tokens, rows, sampling, draws, streamer), tokenizer)
        try:
            streamer.put(rows.so_far())
            put = streamer.put
            seconds = _run(next_tokens, rows, sampling, draws, lambda token_ids: put(torch.tensor(token_ids)))
        finally:
            streamer.end()
        return rows.output(seconds, tokenizer)


class _Draws:
    """Uniform numbers for each row, independent of the number of rows."""

    def __init__(self, batch_size: int, seed: int | None) -> None:
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        check_integer("seed", seed, low=0)
        self._rows = [np.random.default_rng((seed, row)) for row in range(batch_size)]

    def next(self) -> npt.NDArray[np.float64]:
        # Drawn in float32, the type in which they are used, so that none is rounded up to 1.
        return np.array([row.random(dtype=np.float32) for row in self._rows], dtype=np.float64)


class _Rows:
    def __init__(self, prompts: IntArray, max_new_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
        batch_size, self.num_prompt_tokens = prompts.shape
        self.text = torch.zeros(batch_size, self.num_prompt_tokens + max_new_tokens, dtype=torch.int64)
        self.text[:, : self.num_prompt_tokens] = torch.from_numpy(prompts)
        self.length = self.num_prompt_tokens
        self.num_computed = 0
        self.answers: list[list[int]] = [[] for _ in range(batch_size)]
        self._eos_token_ids = eos_token_ids

    def so_far(self) -> Tensor:
        return self.text[:, : self.length]

    @property
    def are_done(self) -> bool:
        return self.length == self.text.shape[1] or all(map(self._has_ended, self.answers))

    def _has_ended(self, answer: list[int]) -> bool:
        return bool(answer) and answer[-1] in self._eos_token_ids

    def append(self, drawn: Sequence[int]) -> list[int]:
        """Add a step's tokens. Returns them, with padding for rows that have ended."""
        added = list(drawn)
        for row, answer in enumerate(self.answers):
            if self._has_ended(answer):
                added[row] = self._eos_token_ids[0]
            else:
                answer.append(added[row])
        self.text[:, self.length] = torch.tensor(added)
        self.num_computed = self.length
        self.length += 1
        return added

    def output(self, seconds: list[float], tokenizer: Decoder | None) -> GenerationOutput:
        texts = None
        if tokenizer is not None:
            texts = [tokenizer.decode(answer[:-1] if self._has_ended(answer) else answer) for answer in self.answers]
        timings = GenerationTimings(
            batch_size=len(self.answers),
            num_prompt_tokens=len(self.answers) * self.num_prompt_tokens,
            num_new_tokens=sum(map(len, self.answers)),
            num_steps=len(seconds),
            ttft_s=seconds[0],
            decode_s=sum(seconds[1:]),
        )
        return GenerationOutput(self.answers, self.so_far().clone(), texts, timings)


def _run(
    next_tokens: NextTokens,
    rows: _Rows,
    sampling: UniformValues,
    draws: _Draws,
    put: Callable[[list[int]], object] | None,
) -> list[float]:
    """Compute steps until all rows are done. Returns each step's time in seconds."""
    seconds = []
    while not rows.are_done:
        step = GenerationStep(rows.so_far(), rows.num_computed, {**sampling, "random_val": draws.next()})
        start_time = perf_counter()
        drawn = next_tokens(step)
        seconds.append(perf_counter() - start_time)
        added = rows.append(drawn)
        if put is not None:
            put(added)
    return seconds
