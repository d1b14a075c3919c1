"""Whatever is wrong with a request, the reply says what, in OpenAI's shape, and the next request is served."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from server_driver import Server, check_error

CHAT = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(autouse=True)
def still_serves(server: Server) -> Any:
    yield
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    assert server.is_empty()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_token": 5}, "max_token", "max_token is not known"),
        ({"stream_options": {"include_all": True}, "stream": True}, "stream_options.include_all", "not known"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": 5.5}, "max_tokens", "valid integer"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 17}, "n", "max_n"),
        ({"stop": ["x"] * 17}, "stop", "max_stops"),
        ({"stop": "y" * 257}, "stop", "max_stop_length"),
        ({"stop": [""]}, "stop", "empty"),
        ({"logprobs": 21}, "logprobs", "max_logprobs"),
        *(
            ({"logit_bias": {key: 1}}, "logit_bias", "token ids")
            for key in ("a", "1_0", "+1", "-1", " 1", "1 ", "1.0", "007", "١", "1\n", "", "9" * 5000)
        ),
        ({"logit_bias": {"300": 1}}, None, "outside the vocabulary"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "max_logit_bias"),
        ({"stop_token_ids": [300]}, None, "outside the vocabulary"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "min_tokens"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "no tokens"),
        ({"prompt": [5, 300]}, "prompt", "0 to 299"),
        ({"prompt": [-1]}, "prompt", "0 to 299"),
        ({"prompt": [[1], "a"]}, "prompt", "valid"),
        ({"prompt": {"a": 1}}, "prompt", "valid string"),
        ({"prompt": None}, "prompt", "valid string"),
        ({"prompt": ["a"] * 129}, "prompt", "max_prompts"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        ({"prompt": "z" * 8192}, "prompt", "tokens"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"timeout": 0}, "timeout", "greater than 0"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "combined"),
        ({"guided_choice": ["b"], "stop": "x"}, "stop", "combined"),
        ({"user": 7}, "user", "valid string"),
    ],
)
def test_bad_completions(server: Server, body: dict[str, Any], param: str | None, words: str) -> None:
    text = json.dumps({"prompt": "a", **body})
    response = server.http.post("/v1/completions", content=text, headers={"Content-Type": "application/json"})
    error = check_error(response, 400)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages", "'user'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "valid string"),
        ({"messages": [{"role": "user"}]}, "messages", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "text"),
        ({"messages": [{"role": "user", "content": "a", "extra": 1}]}, "messages.0.extra", "not known"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}]}, "messages", "tool_call_id"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "disagree"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "required"),
        ({"tools": []}, "tools", "tools"),
        ({"tools": [TOOL, TOOL]}, "tools", "unique"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
        ({"tool_choice": "required"}, "tools", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tools", "'g'"),
        ({"chat_template_kwargs": {"nonsense": 1}}, "messages", "nonsense"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "self"),
        ({"prompt": "a"}, "prompt", "not known"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "needs a model that reasons"),
    ],
)
def test_bad_chats(server: Server, body: dict[str, Any], param: str, words: str) -> None:
    error = server.error("/v1/chat/completions", 400, **{"messages": CHAT, **body})
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "body"),
        (b"null", "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (b'{"prompt": "a", "temperature": NaN}', "finite"),
        (b'{"prompt": "a", "temperature": 1e999}', "finite"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"prompt": "\xff\xfe"}', "not valid UTF-8: invalid start byte at byte 12"),
        (b"\x1f\x8b\x08\x00" + bytes(range(128, 160)), "UTF-8"),
        (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 0}', "echo"),
        (b'{"prompt": "a", "temperature": -Infinity}', "finite"),
        (b'{"prompt": "a\x00b"}', "JSON"),
        (b"\x00" * 1000, "JSON"),
        (b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", "deep"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "max_json_nodes"),
        (b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}", "max_json_nodes"),
        (b'{"prompt": [' + b"{}," * 2_000_000 + b"{}]}", "max_json_nodes"),
        (b'{"prompt": [' + b"0.5," * 1_500_000 + b"0.5]}", "prompt.0: input should be a valid"),
        (b'{"prompt": "a", "stop": [' + b"0," * 3_000_000 + b"0]}", "stop.0: input should be a valid string"),
        (b"{" + b",".join(b'"%x": 0' % i for i in range(600_000)) + b"}", "max_json_nodes"),
        (b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d": ""' % i for i in range(40_000)) + b"}}", "logit_bias"),
        (b'{"prompt": "' + rb"\"" * 3_000_000, "JSON"),
        (b'{"prompt": "' + b"[" * 40_000 + rb"\"" * 3_000_000, "JSON"),
        (b'{"prompt": "a", "seed": ' + b"[{:" * 20_000 + b'"}', "max_json_nodes"),
        ("\ufeff{}".encode("utf-16-le"), "UTF-8"),
        (b'{"prompt": "a", "guided_json": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}", "deep"),
        (b'{"prompt": "a", "guided_json": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}", "nested"),
        (json.dumps({"prompt": "a", "stop": ["x"] * 1_000_000}).encode(), "max_stops"),
        (json.dumps({"prompt": [7] * 1_000_000}).encode(), "tokens"),
        (json.dumps({"prompt": "a", **{f"f{i}": i for i in range(10_000)}}).encode(), "not known"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[:40]),
)
def test_bad_bodies(server: Server, content: bytes, words: str) -> None:
    response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    error = check_error(response, 400)
    assert words in error["message"]
    assert len(error["message"]) < 1000


def test_a_body_that_is_too_large(server: Server) -> None:
    check_error(server.http.post("/v1/completions", json={"prompt": "a" * 10_000_000}), 413)

    def pieces() -> Any:  # without a length
        for _ in range(10):
            yield b" " * 1_000_000

    response = server.http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
    assert "max_body_bytes" in check_error(response, 413)["message"]


def test_brackets_in_text_are_no_nodes(server: Server) -> None:
    body = json.dumps({"prompt": '[{:\\"' * 20_000, "max_tokens": 1}).encode()
    response = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert check_error(response, 400)["code"] == "context_length_exceeded"
    body = b"\xef\xbb\xbf" + json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    response = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200


def test_a_compressed_body_is_refused(server: Server) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    body = gzip.compress(b'{"prompt": "a", "max_tokens": 1}')
    error = check_error(server.http.post("/v1/completions", content=body, headers=headers), 415)
    assert error["code"] == "unsupported_content_encoding"
    assert "'gzip'" in error["message"]
    assert "uncompressed" in error["message"]
    headers["Content-Encoding"] = "identity"
    plain = server.http.post("/v1/completions", content=gzip.decompress(body), headers=headers)
    assert plain.status_code == 200


def test_other_kinds_of_requests(server: Server) -> None:
    check_error(server.http.get("/v1/nothing"), 404)
    check_error(server.http.get("/static/nothing"), 404)
    check_error(server.http.get("/static/..%2fapp.py"), 404)
    response = server.http.get("/v1/completions")
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    form = server.http.post("/v1/completions", data={"prompt": "a"})
    assert "application/json" in check_error(form, 415)["message"]
    refused = server.error("/v1/embeddings", 400, input="a")
    assert refused["code"] == "unsupported"
    error = server.error("/tokenize", 400)
    assert "prompt or messages" in error["message"]
    assert server.error("/detokenize", 400, tokens=[300])["param"] == "tokens"


def test_headers_that_are_too_large(server: Server) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    assert server.talk(head + b"X: " + b"a" * 40_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    assert server.talk(head + b"X: " + b"a" * 40_000).startswith(b"HTTP/1.1 431 ")
    assert server.talk(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_another_host_name_is_refused(server: Server) -> None:
    """A page in a browser must not reach a server without a key by a name that points here."""
    response = server.http.get("/v1/models", headers={"Host": "evil.example"})
    assert "evil.example" in check_error(response, 403)["message"]
    assert server.http.get("/v1/models", headers={"Host": "localhost:1234"}).status_code == 200


def test_every_reply_has_security_headers(server: Server) -> None:
    for path in ("/", "/health", "/v1/nothing"):
        headers = server.http.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "server" not in headers


def test_no_page_of_the_framework(server: Server, long_dir: Path) -> None:
    for path in ("/docs", "/redoc"):
        check_error(server.http.get(path), 404)
    assert "/v1/chat/completions" in server.http.get("/openapi.json").json()["paths"]
