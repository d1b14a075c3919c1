"""Parts of the service by themselves: messages, metrics, keys, settings, and what it is without its extra."""

import socket
import subprocess
import sys

import pytest
from prometheus_client import Metric

from infinilm import Config, SamplingParams
from infinilm.distributed import DistConfig
from infinilm.engine.stats import EngineStats
from infinilm.errors import InfinilmError
from infinilm.framing import ChannelClosedError, FrameSocket, frame
from infinilm.outputs import AnswerDelta, RequestMetrics, TokenLogprobs
from infinilm.server.guard import KeyRing
from infinilm.server.messages import (
    Abort,
    Stats,
    Stepped,
    Submit,
    config_from_wire,
    config_to_wire,
    decode_command,
    decode_report,
    encode_message,
    params_from_wire,
    params_to_wire,
)
from infinilm.server.metrics import Metrics, counter, gauge
from infinilm.server.settings import Limits, ServerSettings
from infinilm.structured_output import StructuredOutput

DELTA = AnswerDelta(
    "7",
    1,
    [5, 6],
    [TokenLogprobs(5, -0.5, 1, {5: -0.5, 9: -2.0})],
    "stop",
    "END",
    [None, TokenLogprobs(2, -1.0, 3, {})],
    None,
    RequestMetrics(arrival_time=1.0, queue_time=0.5, num_cached_tokens=16),
)


def test_messages_survive_the_wire_however_it_is_cut() -> None:
    ours, theirs = socket.socketpair()
    commands = [Submit("1", [1, 2, 299], {"top_k": 5}, "salt"), Abort("1"), Submit("2", list(range(5000)), {}, None)]
    data = b"".join(frame(encode_message(command)) for command in commands)
    with ours, theirs:
        reader = FrameSocket(theirs)
        found = []
        for start in range(0, len(data), 1000):
            ours.sendall(data[start : start + 1000])
            found += [decode_command(message) for message in reader.receive_ready_frames()]
        assert found == commands
        assert list(reader.receive_ready_frames()) == []
        ours.sendall(data)
        assert decode_command(reader.receive_frame()) == commands[0]
        list(reader.receive_ready_frames())
        ours.close()
        with pytest.raises(ChannelClosedError):
            list(reader.receive_ready_frames())


def test_reports_survive_the_wire() -> None:
    for report in (
        Stepped([DELTA, AnswerDelta("8", 0, [1], None, None)]),
        Stats(EngineStats(num_steps=3, num_blocks=5)),
    ):
        assert decode_report(encode_message(report)) == report


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, max_tokens=5, logit_bias={3: -1.5}, stop_token_ids=(4, 5), seed=-3, n=2),
        SamplingParams(structured=StructuredOutput(json_schema={"type": "integer"}), logprobs=3, prompt_logprobs=0),
        SamplingParams(structured=StructuredOutput(choice=["a", "b"])),
    ],
)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    sent = decode_command(encode_message(Submit("1", [1], params_to_wire(params), None)))
    assert params_from_wire(sent.params) == params


def test_settings_survive_the_wire() -> None:
    stages = DistConfig(tp_device_ids=[1, 0, 3, 2], pp_size=2)
    for config in (Config(), Config(model="x", seed=4, distributed=stages)):
        assert config_from_wire(config_to_wire(config)) == config


def values_of(metrics: Metrics) -> dict[str, float]:
    lines = metrics.write_text().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_a_histogram_counts_up_to_its_bounds() -> None:
    metrics = Metrics()
    for value in (0.05, 0.1, 0.5, 2.0):
        metrics.itl.observe(value)
    name = "infinilm_inter_token_seconds"
    found = {key.removeprefix(name): value for key, value in values_of(metrics).items() if key.startswith(name)}
    assert found['_bucket{le="0.03"}'] == 0
    assert found['_bucket{le="0.1"}'] == 2
    assert found['_bucket{le="1.0"}'] == 3
    assert found['_bucket{le="2.0"}'] == found['_bucket{le="+Inf"}'] == 4
    assert (found["_sum"], found["_count"]) == (2.65, 4)


def test_every_metric_has_help_and_a_type() -> None:
    metrics = Metrics()
    metrics.requests.labels("stop").inc()

    class State:
        def collect(self) -> list[Metric]:
            return [gauge("a", "A.", 1), counter("b", "B.", 2)]

    metrics.registry.register(State())
    lines = metrics.write_text().decode().splitlines()
    start = lines.index("# HELP infinilm_requests_total Requests for text, by how they ended.")
    assert lines[start + 1 : start + 3] == [
        "# TYPE infinilm_requests_total counter",
        'infinilm_requests_total{outcome="stop"} 1.0',
    ]
    assert {"infinilm_a 1.0", "infinilm_b_total 2.0", "# TYPE infinilm_a gauge"} <= set(lines)
    families = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert families == {line.split()[2] for line in lines if line.startswith("# HELP")}
    assert not any("_created" in line for line in lines)


def test_services_share_no_counters() -> None:
    first, second = Metrics(), Metrics()
    first.requests.labels("stop").inc()
    assert 'infinilm_requests_total{outcome="stop"}' not in values_of(second)


def test_keys() -> None:
    keys = KeyRing(["first-key", "second-key"])
    assert keys.find(b"first-key") != keys.find(b"second-key")
    assert keys.find(b"first-key") == KeyRing(["first-key"]).find(b"first-key")
    assert keys.find(b"") is None
    assert keys.find(b"first-ke\xff") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_addresses_of_this_machine_need_no_key(host: str) -> None:
    assert ServerSettings(host=host).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_all_others_do(host: str) -> None:
    with pytest.raises(InfinilmError, match="no API key"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, api_keys=("long-enough",)).host == host


@pytest.mark.parametrize("pair", ["max_n=0", "max_n=1.5", "request_timeout=0", "request_timeout=nan", "max_n", "n=1"])
def test_bad_limits(pair: str) -> None:
    with pytest.raises(InfinilmError, match=pair.partition("=")[0]):
        Limits.from_pairs([pair])
    assert Limits.from_pairs(["max-n=3", "read_timeout=0.5"]) == Limits(max_n=3, read_timeout=0.5)


def run_code(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_http_process_does_without_torch() -> None:
    code = "import infinilm.server.run, sys; print(sorted({'torch', 'transformers', 'llguidance'} & set(sys.modules)))"
    assert run_code(code) == "[]\n"


def test_without_the_extra_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None; sys.stderr = sys.stdout\n"
        "from infinilm.cli.main import run; print(run(['serve']))"
    )
    assert run_code(code) == "error: serving needs fastapi; install it with: pip install 'infinilm[serve]'\n2\n"
