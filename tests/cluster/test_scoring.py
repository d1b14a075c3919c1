"""The choice of a replica, without replicas."""

from infinilm.cluster.scoring import EXPECTED_S, SESSION_TOKENS, Choice, Scoreboard


def make_board(*replica_ids: str) -> Scoreboard:
    board = Scoreboard(block_size=16)
    for each in replica_ids:
        board.change_cache(each, (), ())
    return board


def test_the_longest_cached_beginning_wins() -> None:
    board = make_board("a", "b", "c")
    board.change_cache("a", [1, 2], ())
    board.change_cache("b", [1, 2, 3], ())
    assert board.choose([1, 2, 3, 4], 70, ["a", "b", "c"]) == Choice("b", "prefix", 48)


def test_a_queue_longer_than_the_cached_beginning_loses() -> None:
    board = make_board("a", "b")
    board.change_cache("a", [1, 2], ())
    board.note_load("a", queued_tokens=33, num_running=0)
    assert board.choose([1, 2], 40, ["a", "b"]).replica_id == "b"
    board.note_load("a", queued_tokens=31, num_running=0)
    assert board.choose([1, 2], 40, ["a", "b"]).replica_id == "a"


def test_evicted_blocks_no_longer_count() -> None:
    board = make_board("a", "b")
    board.change_cache("a", [1, 2, 3], ())
    board.change_cache("a", (), [2, 3])
    assert board.choose([1, 2, 3], 50, ["a", "b"]).cached_tokens == 16


def test_blocks_without_the_beginning_are_worth_nothing() -> None:
    board = make_board("a")
    board.change_cache("a", [2, 3], ())
    assert board.choose([1, 2, 3], 50, ["a"]).cached_tokens == 0


def test_a_prompt_just_sent_is_expected_in_the_cache_for_a_while() -> None:
    board = make_board("a", "b")
    first = board.choose([1, 2], 40, ["a", "b"])
    board.note_sent(first, [1, 2], 40, time=0.0)
    board.note_load(first.replica_id, 0, 0)
    assert board.choose([1, 2], 40, ["a", "b"]) == Choice(first.replica_id, "prefix", 32)
    board.note_sent(first, [8, 9], 40, time=EXPECTED_S + 1)  # what is new removes what is old
    assert board.views[first.replica_id].count_cached([1, 2]) == 0


def test_an_eviction_ends_the_expectation() -> None:
    board = make_board("a")
    board.note_sent(board.choose([1, 2], 40, ["a"]), [1, 2], 40, time=0.0)
    board.change_cache("a", [1, 2], ())
    board.change_cache("a", (), [1, 2])
    assert board.views["a"].count_cached([1, 2]) == 0


def test_a_session_stays_and_does_not_depend_on_the_front() -> None:
    names = [f"r{number}" for number in range(20)]
    homes = {make_board(*names).choose([], 10, names, "someone").replica_id for _ in range(5)}
    assert len(homes) == 1
    (home,) = homes
    board = make_board(*names)
    rest = [each for each in names if each != "r0" or each == home]
    assert board.choose([], 10, rest, "someone") == Choice(home, "session", 0)  # another replica's end moves nobody
    board.note_load(home, SESSION_TOKENS + 1, 0)
    assert board.choose([], 10, names, "someone").reason == "load"


def test_tokens_sent_since_the_last_report_count() -> None:
    board = make_board("a", "b")
    choices = set()
    for number in range(10):
        choice = board.choose([number], 20, ["a", "b"])
        board.note_sent(choice, [number], 20, time=0.0)
        choices.add(choice.replica_id)
    loads = [view.load for view in board.views.values()]
    assert choices == {"a", "b"}
    assert max(loads) - min(loads) <= 20
