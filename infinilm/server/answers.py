"""From token ids to an answer's text: incremental, with stop strings cut off."""

from collections.abc import Collection

from infinilm.outputs import TokenLogprobs
from infinilm.server.messages import Delta
from infinilm.text.detokenizer import Detokenizer, StopStrings
from infinilm.text.tokenizer import Tokenizer


class Answer:
    """One choice of a reply, as far as it has come."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        *,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        kept_ids: Collection[int] = (),
    ) -> None:
        self.index = index
        self.text = ""
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[TokenLogprobs] = []
        """Of all tokens so far, those that ended the answer included."""
        self.ends_with_token = False
        """Whether the last token is one that ends answers, and no part of the text."""
        self._detokenizer = Detokenizer(tokenizer, kept_ids=kept_ids)
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def take(self, delta: Delta) -> str:
        """Take in what a step brought; the text that is new, and final."""
        token_ids, reason = delta.token_ids, delta.finish_reason
        self.num_tokens += len(token_ids)
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs
        if reason == "stop" and token_ids:
            self.ends_with_token = True
            token_ids = token_ids[:-1]
        piece = self._detokenizer.feed(token_ids)
        if reason is not None:
            piece += self._detokenizer.finish()
            self.finish_reason, self.stop_reason = reason, delta.stop_reason
        if self._stops is not None and self.num_tokens >= self._min_tokens:
            piece = self._cut(piece, is_last=reason is not None)
        self.text += piece
        return piece

    def _cut(self, piece: str, *, is_last: bool) -> str:
        """Hold back what may become a stop string, and end at one that is met."""
        stops = self._stops
        assert stops is not None
        piece, _ = stops.feed(piece)
        if is_last:
            piece += stops.finish()
        if stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", stops.matched
            self.ends_with_token = False
        return piece
