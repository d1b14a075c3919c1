"""What is checked before anything is deployed, and the options of the commands. No Ray is started."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError

from infinilm.cli.main import run
from infinilm.cluster.service import ask_fronts, choose_resources
from infinilm.errors import InvalidValueError
from infinilm.ray_cluster import Node, check_authentication, check_resources, compare_versions, own_versions

NODES = [Node("a" * 32, "10.0.0.1", {"CPU": 8.0}), Node("b" * 32, "10.0.0.2", {"CPU": 4.0, "GPU": 2.0})]


def test_resources_that_no_node_has_are_named_with_what_each_has() -> None:
    check_resources(NODES, {"CPU": 4.0, "GPU": 0.0}, 3)
    with pytest.raises(InvalidValueError) as error:
        check_resources(NODES, {"CPU": 1.0, "GPU": 1.0}, 3)
    text = str(error.value)
    assert "3 replicas ask for 1 CPU, 1 GPU each, and 2 fit" in text
    assert "node aaaaaaaa (10.0.0.1) has 8 CPU, which is enough for 0" in text
    assert "node bbbbbbbb (10.0.0.2) has 4 CPU, 2 GPU, which is enough for 2" in text


def test_a_front_whose_node_has_just_died_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_with(*answers: Any) -> None:
        response = SimpleNamespace(results=lambda **_: list(answers))
        handle = SimpleNamespace(broadcast=lambda _method: response)
        monkeypatch.setattr(serve, "get_app_handle", lambda _name: handle)

    answer_with({"node": "a"}, ActorDiedError(), {"node": "b"})
    assert ask_fronts("app") == [{"node": "a"}, {"node": "b"}]
    answer_with({"node": "a"}, ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        ask_fronts("app")


def test_versions_that_differ_are_named_with_their_node() -> None:
    own = own_versions()
    compare_versions(dict.fromkeys(NODES, own))
    with pytest.raises(
        InvalidValueError, match=rf"node b+ \(10.0.0.2\) has Ray 1.0, this process {own['Ray']}; install"
    ):
        compare_versions({NODES[0]: own, NODES[1]: {**own, "Ray": "1.0"}})


def test_ray_without_tokens_is_refused_where_others_can_reach_it() -> None:
    check_authentication([Node("a" * 32, "127.0.0.1", {})], {})
    check_authentication(NODES, {"RAY_AUTH_MODE": "token"})
    with pytest.raises(InvalidValueError, match="RAY_AUTH_MODE=token"):
        check_authentication(NODES, {})


def test_a_replica_gets_a_gpu_for_each_rank_or_its_share_of_a_nodes_cpus() -> None:
    assert choose_resources(NODES, "auto", 2, 1) == (1.0, 2.0)
    assert choose_resources(NODES, "cpu", 1, 4) == (2.0, 0.0)
    assert choose_resources(NODES[:1], "auto", 1, 1) == (8.0, 0.0)
    assert choose_resources(NODES[:1], "auto", 1, 20) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "2", "--max-replicas", "3"], "give either it, or --min-replicas and --max-replicas"),
        (["--min-replicas", "3", "--max-replicas", "2"], "3 to 2 replicas"),
        (["--replicas", "0"], "the least is 1"),
        (["--host", "0.0.0.0"], "no API key"),
        (["--address", "127.0.0.1:1"], "no Ray cluster is reachable at '127.0.0.1:1'"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "serve", *options]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_the_extra_is_named_where_ray_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["cluster", "serve"]) == 2
    assert "pip install 'infinilm[cluster]'" in capsys.readouterr().err


def test_the_written_configuration_is_one_that_serve_deploy_takes(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    from ray.serve.schema import ServeDeploySchema

    from infinilm.cluster.deployment import ClusterOptions

    path = tmp_path / "service.yaml"
    assert run(["cluster", "serve", "model", "--replicas", "3", "--limit", "max_n=2", "--write-config", str(path)]) == 0
    assert path.stat().st_mode & 0o077 == 0  # it has secrets
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text())).applications
    assert application.import_path == "infinilm.cluster.deployment:build"
    options = ClusterOptions(**application.args)
    assert (options.config["model"], options.max_replicas, options.settings["limits"]["max_n"]) == ("model", 3, 2)


def test_no_other_command_imports_ray() -> None:
    code = "import sys, infinilm, infinilm.cli.main, infinilm.server.app; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
