"""The order in which prompts share a step's token budget. Pure functions: no torch, no clock, no randomness."""

from operator import attrgetter

from infinilm.engine.sequence import Sequence

by_arrival = attrgetter("arrival")


def order_prompts(prompts: list[Sequence], oldest: Sequence | None, budget: int) -> list[Sequence]:
    """Short prompts in order of arrival, then long ones, those with the fewest tokens left first.

    A short prompt fits into the step's `budget`. Tenants (`cache_salt`) share the budget: a prompt's size includes the
    sizes of the same tenant's prompts before it, so each tenant's first `budget` tokens come before any tenant's
    further ones. The scheduler reserves a part of every step for `oldest`. If `oldest` is long, the long prompts of
    other tenants come before those of its tenant.
    """
    ordered = sorted(prompts, key=by_arrival)
    if all(len(seq.token_ids) <= budget and seq.cache_salt == ordered[0].cache_salt for seq in ordered):
        return ordered
    sizes = {seq.arrival: seq.num_remaining for seq in ordered}
    ordered.sort(key=lambda seq: max(sizes[seq.arrival], budget))
    is_oldest_long = oldest is not None and sizes[oldest.arrival] > budget
    totals: dict[bytes, int] = {}
    ranks = {}
    for seq in ordered:
        total = totals[seq.cache_salt] = totals.get(seq.cache_salt, 0) + sizes[seq.arrival]
        if total <= budget:
            ranks[seq.arrival] = (0, 0)
        elif oldest is None or not is_oldest_long or seq.cache_salt != oldest.cache_salt:
            ranks[seq.arrival] = (1, total)
        else:
            ranks[seq.arrival] = (2, total)
    return sorted(ordered, key=lambda seq: ranks[seq.arrival])
