"""Makes a failing case smaller: leaves out what it does not need to fail."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.cases import Case


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """A smaller case that fails as well; the same if there is none."""
    while smaller := next(filter(fails, _smaller(case)), None):
        case = smaller
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """The case without one of its parts."""
    for index in range(len(case.arrivals)):
        if len(case.arrivals) > 1:
            yield replace(case, arrivals=case.arrivals[:index] + case.arrivals[index + 1 :])
    for index in range(len(case.aborts)):
        yield replace(case, aborts=case.aborts[:index] + case.aborts[index + 1 :])
    for index, arrival in enumerate(case.arrivals):
        for simpler in (
            replace(arrival, callback=None),
            replace(arrival, cache_salt=None),
            replace(arrival, tick=0),
            *(
                replace(arrival, spec=replace(arrival.spec, settings=_without(arrival.spec.settings, name)))
                for name in arrival.spec.settings
                if name not in ("temperature", "max_tokens", "seed")
            ),
        ):
            if simpler != arrival:
                yield replace(case, arrivals=(*case.arrivals[:index], simpler, *case.arrivals[index + 1 :]))
    if case.engine.max_in_flight > 1:
        yield replace(case, engine=replace(case.engine, max_in_flight=1))


def _without(settings: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in settings.items() if key != name}
