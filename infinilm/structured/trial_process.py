"""The process that tries out grammars: a grammar that hangs, crashes or exhausts memory does so here.

`TrialProcess` sends a vocabulary first, then grammars; each is answered with a `Verdict`. This process has less stack,
memory and time than the engine, so a grammar that passes here is safe there.
"""

import json
import math
import random
import re
import sys
import threading
import time
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from infinilm.framing import ChannelClosedError, FrameSocket
from infinilm.processes import parent_socket
from infinilm.structured.schema import SchemaError, supported_schema
from infinilm.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

TRIAL_S = 1.6  # a grammar that has not passed by then is refused
TRIAL_TOKENS = 48
MAX_TOKEN_S = 0.25  # of processor time, for any one token
_STACK_BYTES = 1 << 20  # threads elsewhere have 2 MiB or more
_MEMORY_BYTES = 1 << 30  # of address space, most of which is never used


class Verdict(NamedTuple):
    error: str  # why the grammar is refused; empty if it is not
    grammar: str = ""  # with schemas that llguidance can enforce


def parser_limits() -> "LLParserLimits":
    """Limits on the cost of a grammar, when it is compiled and at each token. Reaching one of them is an error."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        max_grammar_size=100_000,
        max_lexer_states=20_000,  # about 1 kB each, kept as long as the grammar
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_items_in_row=1_000,  # an object with 250 optional properties; the time for a token grows with its square
        verbose_errors=False,
    )


def judge(lltokenizer: "LLTokenizer", grammar: str) -> Verdict:
    """Rewrite a grammar's schemas to what llguidance can enforce, and try the grammar out."""
    try:
        grammar = _with_supported_schemas(grammar)
        return Verdict(try_out(lltokenizer, grammar), grammar)
    except SchemaError as error:
        return Verdict(str(error))
    except BaseException as error:  # a panic of the library is not an Exception
        return Verdict(f"{type(error).__name__}: {error}")


def _with_supported_schemas(grammar: str) -> str:
    parts = json.loads(grammar)
    for part in parts["grammars"]:
        if "json_schema" in part:
            options = part["json_schema"].pop("x-guidance")
            part["json_schema"] = {**supported_schema(part["json_schema"]), "x-guidance": options}
        elif "lark_grammar" in part:
            part["lark_grammar"] = _with_supported_inner_schemas(part["lark_grammar"])
    return json.dumps(parts)


def _with_supported_inner_schemas(lark: str) -> str:
    """The same for each `%json` of a Lark grammar, such as a tool's parameters."""
    decoder = json.JSONDecoder()
    start, pieces = 0, []
    for found in re.finditer(r"%json\s*(?={)", lark):
        if found.start() < start:  # within a schema
            continue
        try:
            schema, end = decoder.raw_decode(lark, found.end())
        except ValueError:  # within a string or a comment, or an error that llguidance reports
            continue
        options = schema.pop("x-guidance", {})
        try:
            text = json.dumps({**supported_schema(schema), "x-guidance": options})
        except SchemaError:
            if not options.get("lenient"):
                raise
            text = lark[found.end() : end]
        pieces += [lark[start : found.end()], text]
        start = end
    return "".join([*pieces, lark[start:]])


def try_out(lltokenizer: "LLTokenizer", grammar: str) -> str:
    """Compile a grammar and follow it for a few random tokens. Returns an error message, or an empty string."""
    from llguidance import LLMatcher

    matcher = LLMatcher(lltokenizer, grammar, log_level=0, limits=parser_limits())
    draws = random.Random(0)
    for _ in range(TRIAL_TOKENS):
        if matcher.is_stopped():  # complete, or an error
            break
        start = time.thread_time()
        mask = matcher.compute_bitmask()
        if matcher.is_error() or (token_id := _random_token(mask, draws, end=lltokenizer.eos_token)) is None:
            break
        matcher.consume_token(token_id)
        if (seconds := time.thread_time() - start) > MAX_TOKEN_S:
            return f"it takes {seconds:.2f} s to see what may come next; make it simpler"
    return matcher.get_error()


def _random_token(mask: bytes, draws: random.Random, end: int) -> int | None:
    """A token whose bit is set; not `end`, which is the last one."""
    start = draws.randrange(len(mask))
    for place, part in ((start, mask[start:]), (0, mask)):
        index = len(part) - len(part.lstrip(b"\0"))
        byte = part[index] if index < len(part) else 0
        token_ids = [(place + index) * 8 + bit for bit in range(8) if byte >> bit & 1]
        if token_ids and token_ids != [end]:
            return draws.choice([token_id for token_id in token_ids if token_id != end])
    return None


def send_vocabulary(frames: FrameSocket, vocabulary: Vocabulary) -> None:
    header = {"lengths": [len(token) for token in vocabulary.tokens], "special_ids": sorted(vocabulary.special_ids)}
    frames.send_frame(json.dumps(header).encode())
    frames.send_frame(b"".join(vocabulary.tokens))


def _receive_vocabulary(frames: FrameSocket) -> Vocabulary:
    header = json.loads(frames.receive_frame())
    tokens = BytesIO(frames.receive_frame())
    return Vocabulary([tokens.read(length) for length in header["lengths"]], frozenset(header["special_ids"]), False)


def _limit_memory() -> None:
    import resource  # not on every system; the engine does not need it

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere it can't be set
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        least = _MEMORY_BYTES if most == resource.RLIM_INFINITY else min(_MEMORY_BYTES, most)
        resource.setrlimit(resource.RLIMIT_AS, (least, most))


def _limit_time() -> None:
    """Let the kernel end this process some time after the trial, in case its parent has ended by then."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + TRIAL_S) + 1, most))


def main() -> None:
    _limit_memory()
    frames = FrameSocket(parent_socket())
    lltokenizer = _receive_vocabulary(frames).lltokenizer()
    threading.stack_size(_STACK_BYTES)
    verdicts: list[Verdict] = [Verdict("")]  # the first says that this process is ready

    def run(grammar: str) -> None:
        verdicts.append(judge(lltokenizer, grammar))

    while True:
        try:
            frames.send_frame(json.dumps(verdicts.pop()).encode())
            grammar = frames.receive_frame().decode()
        except ChannelClosedError:
            return
        _limit_time()
        thread = threading.Thread(target=run, args=(grammar,))
        thread.start()
        thread.join()


if __name__ == "__main__":
    main()
