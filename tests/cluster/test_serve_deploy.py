"""The YAML of `--write-config`, deployed by Ray's own command: `make test-cluster`."""

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_driver import KEYS, STORE, post, reset_authentication, wait_until

from infinilm import ray_cluster
from infinilm.cluster import service

pytestmark = pytest.mark.skipif("INFINILM_TEST_CLUSTER" not in os.environ, reason="slow: make test-cluster")

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_serve_deploy_takes_the_file_and_the_service_answers(
    long_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    environment = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    reset_authentication()
    file, name, port = tmp_path / "service.yaml", "deployed", free_port()
    options = ("--port", "0", "--name", name, "--num-kvcache-blocks", "64", "--api-key", KEYS[0])
    run(sys.executable, "-m", "infinilm", "cluster", "serve", str(long_dir), *options, "--write-config", str(file))
    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": STORE, **dashboard})
    try:
        run(str(Path(sys.executable).parent / "serve"), "deploy", str(file), "--address", f"http://127.0.0.1:{port}")
        ray_cluster.connect(cluster.address, may_start=False)
        wait_until(lambda: is_up(name), describe=lambda: service.explain_failure(name))
        (front,) = service.ask_fronts(name)
        assert front["state"] == "ready"
        assert post(front["address"], prompt="hello").status_code == 200
        assert post(front["address"], key="another", prompt="hello").status_code == 401
        service.stop(name)
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()
        monkeypatch.undo()
        reset_authentication()


def is_up(name: str) -> bool:
    from ray import serve

    application = serve.status().applications.get(name)
    return application is not None and application.status == "RUNNING"
