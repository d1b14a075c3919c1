"""Merges that are derived from scores."""

from random import Random

import numpy as np

from infinilm.text import merges
from infinilm.text.merges import derive_merges


def derive_by_trying(tokens: list[str], scores: list[float], results: list[int]) -> list[tuple[str, str]]:
    found = [
        (scores[index], cut, len(tokens[index]) - cut, (tokens[index][:cut], tokens[index][cut:]))
        for index in results
        for cut in range(1, len(tokens[index]))
        if {tokens[index][:cut], tokens[index][cut:]} <= set(tokens)
    ]
    return [pair for *_, pair in sorted(found, key=lambda merge: merge[:3], reverse=True)]


def test_merges_are_those_found_by_trying_all_cuts(monkeypatch) -> None:
    for seed in range(20):
        random = Random(seed)
        tokens = [*{"".join(random.choices("ab▁é😀", k=random.randint(1, 7))) for _ in range(400)}, "", "ab"]
        scores = [float(random.randint(-5, 5)) for _ in tokens]  # many are equal
        results = [index for index in range(len(tokens)) if random.random() < 0.9]
        # A small table: most tokens do not have their slot for themselves.
        monkeypatch.setattr(merges, "_SLOT_BITS", random.choice([1, 6, 22]))
        lengths = np.array([len(token) for token in tokens])
        expected = derive_by_trying(tokens, scores, results)
        assert derive_merges(tokens, lengths, scores, np.array(results)) == expected
        assert len(expected) > 100


def test_a_vocabulary_of_single_characters_has_no_merges() -> None:
    assert derive_merges(["a", "b"], np.array([1, 1]), [0.0, 0.0], np.array([0, 1])) == []
