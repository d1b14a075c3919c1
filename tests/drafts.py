"""Draft tokens made from answers that are known already, and what must not depend on them."""

from collections.abc import Callable, Sequence

from xxhash import xxh32_intdigest

from infinilm import RequestOutput
from infinilm.engine.sequence import Sequence as TokenSequence


def guesses(answers: Sequence[RequestOutput], num_drafts: int) -> Callable[[TokenSequence], list[int]]:
    """Drafts from answers known already; a third of them is wrong."""
    known = {
        (tuple(output.prompt_token_ids), answer.index): answer.token_ids
        for output in answers
        for answer in output.outputs
    }

    def guess(seq: TokenSequence) -> list[int]:
        answer = known[tuple(seq.token_ids[: seq.num_prompt_tokens]), seq.index]
        first = seq.num_output_tokens
        drafts = [*answer[first : first + num_drafts]]
        drafts += [3] * (num_drafts - len(drafts))  # beyond the answer's end
        is_right = [xxh32_intdigest(f"{seq.seed}/{first + i}".encode()) % 3 > 0 for i in range(num_drafts)]
        return [draft if right else draft + 1 for draft, right in zip(drafts, is_right, strict=True)]

    return guess


def essence(output: RequestOutput) -> list[tuple[object, ...]]:
    return [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in output.outputs]
