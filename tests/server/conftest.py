"""What the tests of the service share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_driver import Server, serving


@pytest.fixture(scope="session")
def server(long_dir: Path) -> Iterator[Server]:
    """A server with the usual settings."""
    with serving(long_dir, "--num-kvcache-blocks", "2048") as running:
        yield running
