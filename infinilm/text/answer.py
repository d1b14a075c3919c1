"""One answer of a model, built from its tokens."""

from collections.abc import Collection, Sequence

from infinilm.outputs import FinishReason, TokenLogprobs
from infinilm.text.detokenizer import Detokenizer, StopStrings
from infinilm.text.tokenizer import Tokenizer


class Answer:
    """An answer so far: its text, decoded as tokens arrive and cut at the first stop string, and how it ended.

    Stop strings count from the token `min_tokens` on. Special tokens among `kept_ids` stay in the text. Without a
    tokenizer there is no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        index: int = 0,
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        kept_ids: Collection[int] = (),
    ) -> None:
        self.index = index
        self.text = ""
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[TokenLogprobs] = []
        """The log-probabilities of all tokens so far, including a token that ended the answer."""
        self.ends_with_token = False
        """Whether the last token ended the answer and is not part of the text."""
        self._detokenizer = Detokenizer(tokenizer, kept_ids=kept_ids) if tokenizer is not None else None
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def append(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None = None, stop_reason: int | str | None = None
    ) -> str:
        """Append the next tokens, and how the answer ends, if it does. Returns the text that is new and final.

        Tokens after the one that completes a stop string are dropped.
        """
        if len(token_ids) > 1 and self._stops is not None:
            return self._append_singly(token_ids, finish_reason, stop_reason)
        self.num_tokens += len(token_ids)
        if finish_reason == "stop" and token_ids:
            self.ends_with_token = True
            token_ids = token_ids[:-1]
        piece = self._detokenizer.feed(token_ids) if self._detokenizer is not None else ""
        if finish_reason is not None:
            piece += self._detokenizer.finish() if self._detokenizer is not None else ""
            self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if self._stops is not None and self.num_tokens >= self._min_tokens:
            piece = self._cut(piece, self._stops)
        self.text += piece
        return piece

    def _append_singly(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> str:
        pieces: list[str] = []
        for token_id in token_ids[:-1]:
            pieces.append(self.append([token_id]))
            if self.finish_reason is not None:
                return "".join(pieces)
        return "".join(pieces) + self.append(token_ids[-1:], finish_reason, stop_reason)

    def _cut(self, piece: str, stops: StopStrings) -> str:
        """Hold back text that may become a stop string, and end the answer at one."""
        piece, _ = stops.feed(piece)
        if self.finish_reason is not None:
            piece += stops.finish()
        if stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", stops.matched
            self.ends_with_token = False
        return piece
