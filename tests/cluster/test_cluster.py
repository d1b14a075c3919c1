"""The service on a real Ray cluster of three raylets. One cluster serves all tests of this file, in their order."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster_driver import APP, KEYS, LocalCluster, StreamClient, local_cluster, num_ready, post, replica_of, wait_until

from infinilm import LLM, SamplingParams, ray_cluster
from infinilm.cluster import service
from infinilm.errors import InvalidValueError

NUM_STREAMS = 20


@pytest.fixture(scope="module")
def cluster(long_dir: Path) -> Iterator[LocalCluster]:
    with local_cluster(long_dir) as running:
        running.deploy()
        yield running


@pytest.fixture(scope="module")
def url(cluster: LocalCluster) -> str:
    return cluster.head_url()


def test_every_node_has_a_front_and_every_engine_a_node(cluster: LocalCluster) -> None:
    wait_until(lambda: num_ready() == 2)
    fronts = service.ask_fronts(APP)
    assert len({front["node"] for front in fronts}) == 3
    replicas = fronts[0]["replicas"]
    assert len({each["replica"] for each in replicas}) == 2
    for front in fronts:
        assert post(front["address"], prompt="hello").status_code == 200


def test_answers_equal_those_of_one_engine(url: str, long_dir: Path) -> None:
    prompts = [f"question {number} " * 5 for number in range(4)]
    with LLM(long_dir, num_kvcache_blocks=64) as llm:
        alone = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0))
    for prompt, expected in zip(prompts, alone, strict=True):
        assert post(url, prompt=prompt, max_tokens=12).json()["choices"][0]["text"] == expected.outputs[0].text


def num_cached(front: dict[str, Any], replica_id: str) -> int:
    """Blocks that a replica has in its cache, as far as a front has heard."""
    return next(each.get("cached_blocks", 0) for each in front["replicas"] if each["replica"] == replica_id)


def test_a_prompt_goes_where_its_beginning_is_cached_and_tenants_share_nothing(cluster: LocalCluster) -> None:
    urls = [front["address"] for front in service.ask_fronts(APP)]
    prompt = "a system prompt that all requests begin with " * 8
    first = post(urls[0], prompt=prompt)
    wait_until(lambda: all(num_cached(front, replica_of(first)) >= 20 for front in service.ask_fronts(APP)))
    time.sleep(0.3)  # the hashes follow the number
    for number, url in enumerate(urls * 2):
        response = post(url, prompt=prompt + f"question {number}")
        assert replica_of(response) == replica_of(first)
        assert "reason=prefix" in response.headers["x-infinilm-replica"]
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 300
    other = post(urls[0], key=KEYS[1], prompt=prompt)
    assert "cached=0" in other.headers["x-infinilm-replica"]
    assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_session_stays_on_its_replica_whichever_front_is_asked(cluster: LocalCluster) -> None:
    urls = [front["address"] for front in service.ask_fronts(APP)]
    for session in ("one", "two", "three"):
        found = {
            replica_of(post(url, headers={"X-Session-Id": session}, prompt=f"{session} {number}"))
            for number, url in enumerate(urls)
        }
        assert len(found) == 1


def test_keys_are_asked_for_as_by_the_single_server(url: str) -> None:
    assert post(url, key="a-wrong-key", prompt="hello").status_code == 401
    assert post(url, prompt="hello", unknown=1).status_code == 400


def test_one_scrape_has_the_metrics_of_all_replicas(url: str) -> None:
    text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}).text
    lines = [line for line in text.splitlines() if line.startswith("infinilm_replica_output_tokens_total{")]
    assert len(lines) == 2
    assert all('replica="' in line and 'node="' in line for line in lines)


def test_full_replicas_refuse_with_a_time_to_try_again(cluster: LocalCluster, url: str) -> None:
    clients = [StreamClient(url, {"prompt": f"fill {number}", "max_tokens": 300}) for number in range(32)]
    for client in clients:
        client.thread.join(60)
    refused = [client for client in clients if client.status == 429]
    assert 0 < len(refused) < 32  # some may end before the last begin
    assert all("max_requests=12" in client.error for client in refused)
    assert all(client.is_complete for client in clients if client.status == 200)


def test_more_than_the_nodes_have_is_refused_with_what_each_has(cluster: LocalCluster) -> None:
    with pytest.raises(InvalidValueError, match=r"5 replicas ask for 1 CPU, 1 engine each, and 4 fit: node \w+ \("):
        ray_cluster.check_resources(ray_cluster.live_nodes(), {"CPU": 1.0, "GPU": 0.0, "engine": 1.0}, 5)


def test_a_raylet_is_killed_under_open_streams_and_the_service_mends_itself(cluster: LocalCluster, url: str) -> None:
    clients = [StreamClient(url, {"prompt": f"story {number}", "max_tokens": 6000}) for number in range(NUM_STREAMS)]
    wait_until(lambda: all(client.num_events > 3 for client in clients))
    victim = cluster.workers.pop()
    hit = {each["replica"] for each in service.ask_fronts(APP)[0]["replicas"] if each["node"] == victim.node_id}
    assert hit
    kill_time = time.monotonic()
    cluster.cluster.remove_node(victim, allow_graceful=False)
    on_victim = [client for client in clients if client.replica.split(",")[0] in hit]
    assert on_victim
    for client in on_victim:
        client.thread.join(30)
        assert client.is_complete or ("cut off after" in client.error and victim.node_id[:8] in client.error)
    print(f"the last of {len(on_victim)} clients knew after {max(c.end_time for c in on_victim) - kill_time:.2f} s")
    answer = post(url, prompt="still there?")
    # The streams of the others may leave no room beside them.
    assert answer.status_code == 200 or answer.json()["error"]["code"] == "server_full"
    cluster.workers.append(cluster.add_worker())
    wait_until(lambda: num_ready() == 2)
    assert not any(client.error for client in clients if client not in on_victim)
    for client in clients:
        client.is_left = True
