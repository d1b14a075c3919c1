"""What the tests of the command line say to it and hear from it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Done:
    """What a command did."""

    code: int
    out: str
    err: str


Cli = Callable[..., Done]
"""`cli("generate", "…", stdin="…")`."""
