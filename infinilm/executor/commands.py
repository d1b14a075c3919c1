"""The commands that an executor sends to ranks. Needs no torch."""

from enum import StrEnum


class Command(StrEnum):
    """What a rank can be told to do. All but INIT, JOIN and STOP are methods of `RankWorker`."""

    INIT = "init"
    """Set up the device."""
    JOIN = "join"
    """Join the other ranks, at the start and after a step that failed on one of them."""
    LOAD = "load"
    """Build the model."""
    LOAD_SHARDS = "load_shards"
    STATE_DICT = "state_dict"
    RESET_CACHE = "reset_cache"
    CHECK_LAYERS = "check_layers"
    MEASURE_WORKSPACE = "measure_workspace"
    START_ROWS = "start_rows"
    EXECUTE = "execute"
    """Compute a step of requests in rows."""
    FORWARD = "forward"
    """Compute one forward pass."""
    STOP = "stop"
