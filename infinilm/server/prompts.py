"""From what a request brings to checked token ids, without holding up the event loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from infinilm.errors import InfinilmError
from infinilm.server.api_errors import bad_request
from infinilm.text.tokenizer import Tokenizer

T = TypeVar("T")

NUM_THREADS = 2
MAX_INLINE_CHARS = 4096
"""A text that is tokenised faster than a thread would get its turn."""


class PromptMaker:
    """Renders chat templates and makes tokens of texts, in threads and within a time limit."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        vocab_size: int,
        timeout: float,
        parse_special_tokens: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._parse_special_tokens = parse_special_tokens
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._timeout = timeout
        longest = max((len(token) for token in tokenizer.backend.get_vocab(with_added_tokens=True)), default=1)
        self._max_chars = max_tokens * longest
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompts")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """The tokens of a text."""
        if not text:
            raise bad_request(f"{param} is empty; give at least one character", param)
        self._check_chars(text, param)
        job = partial(self.tokenizer.encode, text, add_special_tokens)
        token_ids = _refusing(job, param) if len(text) <= MAX_INLINE_CHARS else await self._run(job, param)
        return self.check_ids(token_ids, param)

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        """The tokens of a conversation, up to where the answer begins; `variables` are for its template.

        Special tokens in messages are text, unless the server's settings say otherwise.
        """
        job = partial(
            self.tokenizer.encode_chat,
            messages,
            parse_special_tokens=self._parse_special_tokens,
            check_text=partial(self._check_chars, param="messages"),
            **variables,
        )
        return self.check_ids(await self._run(job, "messages"), "messages")

    def check_ids(self, token_ids: list[int], param: str) -> list[int]:
        """Refuse what is empty, too long, or outside the vocabulary."""
        if not token_ids:
            raise bad_request(f"{param} has no tokens; give at least one", param)
        if len(token_ids) >= self._max_tokens:
            raise bad_request(
                f"{param} has {len(token_ids)} tokens; this model takes {self._max_tokens} with the answer, so at most "
                f"{self._max_tokens - 1} here",
                param,
                "context_length_exceeded",
            )
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            bad = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise bad_request(f"{param} has the token id {bad}; ids are 0 to {self._vocab_size - 1}", param)
        return token_ids

    def _check_chars(self, text: str, param: str) -> None:
        """Refuse what can't fit, however few tokens it is made into, before any work is done."""
        if len(text) > self._max_chars:
            raise bad_request(
                f"{param} has {len(text)} characters, which are more than {self._max_tokens} tokens",
                param,
                "context_length_exceeded",
            )

    async def _run(self, job: Callable[[], T], param: str) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(
                loop.run_in_executor(self._threads, partial(_refusing, job, param)), self._timeout
            )
        except TimeoutError:
            raise bad_request(f"{param} could not be made into tokens within {self._timeout:g} s", param) from None


def _refusing(job: Callable[[], T], param: str) -> T:
    """Run, and make the package's own errors those of a bad request."""
    try:
        return job()
    except InfinilmError as error:
        raise bad_request(str(error), param) from error
