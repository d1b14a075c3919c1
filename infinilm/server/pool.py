"""How many connections there may be, and which of them make room for new ones."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infinilm.server.connection import LimitedConnection

NUM_RESERVED = 32
"""Connections beyond `max_connections`, for when all of those are at work. Only `/health/live` is answered on them."""


class ConnectionPool:
    """The connections that have no request at work. When there are too many connections, they make room."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.num_body_bytes = 0
        """Bytes of the bodies that are being received, or whose request is at work."""
        self._idle: dict[LimitedConnection, None] = {}
        self._reserved: dict[LimitedConnection, None] = {}
        """Connections beyond `max_connections`."""

    def add(self, connection: "LimitedConnection") -> None:
        """Take a new connection. If all others are at work, it is one of the reserve, where the oldest is dropped."""
        if len(connection.connections) <= self.max_connections or self._drop_oldest(self._idle):
            self._idle[connection] = None
            return
        self._reserved[connection] = None
        if len(self._reserved) > NUM_RESERVED:
            self._drop_oldest(self._reserved)

    def note_request(self, connection: "LimitedConnection") -> bool:
        """A request arrived. False if the connection is one of the reserve, and no other makes room for it."""
        self._idle.pop(connection, None)
        is_reserved = connection in self._reserved
        if is_reserved and (len(connection.connections) <= self.max_connections or self._drop_oldest(self._idle)):
            del self._reserved[connection]
            return True
        return not is_reserved

    def note_idle(self, connection: "LimitedConnection") -> None:
        """All responses are sent."""
        self._idle[connection] = None

    def remove(self, connection: "LimitedConnection") -> None:
        """A connection is closed."""
        self._idle.pop(connection, None)
        self._reserved.pop(connection, None)

    def _drop_oldest(self, among: "dict[LimitedConnection, None]") -> bool:
        for connection in among:
            del among[connection]
            connection.transport.abort()
            return True
        return False
