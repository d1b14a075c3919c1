"""Log-probabilities in the two shapes that OpenAI's API has for them."""

from collections.abc import Sequence
from typing import Any

from infinilm.outputs import TokenLogprobs
from infinilm.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""For a token that can't be: JSON has no infinity."""


def chat_logprobs(positions: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """As in chat completions."""
    return {"content": [_chat_position(position, tokenizer) for position in positions], "refusal": None}


def _chat_position(position: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    own = _chat_token(position.token_id, position.logprob, tokenizer)
    return {
        **own,
        "top_logprobs": [_chat_token(token_id, value, tokenizer) for token_id, value in position.top.items()],
    }


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token(token_id),
        "logprob": max(logprob, LOWEST),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """As in completions: parallel lists, where each token's place in the text is counted on from what came before."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, positions: Sequence[TokenLogprobs | None], token_ids: Sequence[int]) -> dict[str, Any]:
        """The lists for the next tokens. The first token of a prompt has no log-probability."""
        tokens: list[str] = []
        offsets: list[int] = []
        for token_id in token_ids:
            tokens.append(self._tokenizer.token(token_id))
            offsets.append(self._offset)
            self._offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [None if each is None else max(each.logprob, LOWEST) for each in positions],
            "top_logprobs": [None if each is None else self._by_text(each) for each in positions],
            "text_offset": offsets,
        }

    def _by_text(self, position: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, best first, and the one that is there. Of two with the same text the better stays."""
        found: dict[str, float] = {}
        for token_id, logprob in (*position.top.items(), (position.token_id, position.logprob)):
            found.setdefault(self._tokenizer.token(token_id), max(logprob, LOWEST))
        return found


def join_lists(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Lists that follow each other, as one."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}
