"""Requests beside long prompts of others: they are answered while those are computed, and as they would be alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_driver import Server, serving, wait_until

KEYS = ("key-of-one", "key-of-two")
SHORT = {"prompt": "Hi", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
LONGS = [{**SHORT, "prompt": [number, 7, 8, 9] * 1000} for number in range(20, 24)]


@pytest.fixture(scope="module")
def server(long_dir: Path) -> Iterator[Server]:
    """With steps so small that a long prompt takes hundreds of them."""
    options = ("--num-kvcache-blocks", "2048", "--max-num-batched-tokens", "16")
    with serving(long_dir, *options, INFINILM_API_KEY=" ".join(KEYS)) as running:
        yield running


def ask(server: Server, key: str, body: dict[str, Any]) -> str:
    reply = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=120
    )
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


@pytest.mark.parametrize("tenants", [(0, 0), (0, 1)], ids=["same", "other"])
def test_a_short_request_is_answered_while_long_prompts_are_computed(server: Server, tenants: tuple[int, int]) -> None:
    server.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
    writer, guest = (KEYS[tenant] for tenant in tenants)
    alone = ask(server, guest, SHORT)
    with ThreadPoolExecutor() as pool:
        before = server.metrics()["infinilm_engine_steps_total"]
        bodies = LONGS[:2] if writer == guest else LONGS[2:]
        writing = [pool.submit(ask, server, writer, body) for body in bodies]
        wait_until(lambda: server.metrics()["infinilm_engine_steps_total"] > before + 3)
        assert ask(server, guest, SHORT) == alone
        assert not any(each.done() for each in writing), "the short request had to wait for a long prompt"
        assert [each.result() for each in writing] == [ask(server, writer, body) for body in bodies]
