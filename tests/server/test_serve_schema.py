"""The server against its own OpenAPI document: requests that follow it and requests that do not, never a 5xx."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from server_driver import Server, serving, wait_until

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def server(long_dir: Path) -> Iterator[Server]:
    """Short answers, whatever is asked for."""
    with serving(long_dir, "--max-model-len", "64", "--num-kvcache-blocks", "256") as running:
        yield running


OPERATIONS = [
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "GET /v1/responses/{name}",
    "DELETE /v1/responses/{name}",
    "POST /v1/embeddings",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /tokenizer_info",
    "GET /health/live",
    "GET /health/ready",
    "GET /health",
    "GET /metrics",
]


@pytest.fixture(scope="module")
def operations(server: Server) -> dict[str, Any]:
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    results: Any = api.get_all_operations()
    found = (result.ok() for result in results)
    return {operation.label: operation for operation in found}


def test_all_operations_are_tried(operations: dict[str, Any]) -> None:
    assert set(operations) == set(OPERATIONS)


@pytest.mark.parametrize(
    ("label", "mode"),
    [(label, GenerationMode.POSITIVE) for label in OPERATIONS]
    + [(label, GenerationMode.NEGATIVE) for label in OPERATIONS if label.startswith("POST") and "embed" not in label],
    ids=str,
)
def test_the_server_keeps_its_own_promises(operations: dict[str, Any], label: str, mode: GenerationMode) -> None:
    @given(operations[label].as_strategy(generation_mode=mode))
    @settings(
        max_examples=int(os.environ.get("SCHEMA_EXAMPLES", "10")),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    check()


def test_nothing_is_left_behind(server: Server) -> None:
    wait_until(server.is_empty)
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
