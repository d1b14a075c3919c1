"""The ASGI application: its routes and middleware."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import Metric
from prometheus_client.registry import Collector
from starlette.middleware import Middleware
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

from infinilm import __version__
from infinilm.server import protocol
from infinilm.server.api_errors import ApiError, bad_request, install_handlers
from infinilm.server.chat import AnswerPlan, chat, encode_chat
from infinilm.server.completions import complete
from infinilm.server.engine_client import State
from infinilm.server.guard import Guard
from infinilm.server.logs import num_dropped_lines
from infinilm.server.metrics import CONTENT_TYPE, counter, gauge
from infinilm.server.responses import create_response, no_such_response
from infinilm.server.responses_request import ResponsesRequest
from infinilm.server.service import Service

PAGE = Path(__file__).parent / "static" / "index.html"

Responses = dict[int | str, dict[str, Any]]

_ERRORS: Responses = {"default": {"model": protocol.ErrorReply, "description": "An error."}}
_EVENTS: Responses = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
_UNREADY: Responses = {
    503: {"description": "The same, when requests are not served now.", "content": {"application/json": {}}}
}


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="infinilm", version=__version__, docs_url=None, redoc_url=None, responses=_ERRORS)
    app.router.route_class = protocol.JsonRoute
    app.state.max_json_nodes = service.limits.max_json_nodes
    install_handlers(app)
    _add_openai_routes(app, service)
    _add_token_routes(app, service)
    _add_health_routes(app, service)
    _add_page(app)
    service.metrics.registry.register(EngineCollector(service))
    paths = [route.path for route in app.routes if hasattr(route, "path")]
    app.user_middleware.append(Middleware(Guard, settings=service.settings, metrics=service.metrics, paths=paths))
    return app


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", operation_id="complete", responses=_EVENTS)
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        """Go on with a text."""
        return await complete(service, body, request)

    @app.post("/v1/chat/completions", operation_id="chat", responses=_EVENTS)
    async def chat_completions(body: protocol.ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await chat(service, body, request)

    @app.post("/v1/responses", operation_id="respond", responses=_EVENTS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, in the form of the Responses API."""
        return await create_response(service, body, request)

    @app.get("/v1/responses/{name:path}", operation_id="get_response")
    @app.delete("/v1/responses/{name:path}", operation_id="delete_response")
    async def stored_response(name: str) -> Response:
        """Always refused: responses are not stored."""
        raise no_such_response(name)

    @app.post("/v1/embeddings", operation_id="embed")
    async def embeddings() -> Response:
        """Always refused: this server generates text."""
        raise bad_request(
            f"{service.model_name!r} generates text; this server has no embeddings", "model", "unsupported"
        )

    @app.get("/v1/models", operation_id="list_models")
    async def models() -> Response:
        """The model that is served."""
        return _json({"object": "list", "data": [_describe_model(service)]})

    @app.get("/v1/models/{name:path}", operation_id="get_model")
    async def model(name: str) -> Response:
        """One model."""
        service.check_model(name)
        return _json(_describe_model(service))


def _describe_model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "infinilm",
        "max_model_len": service.max_model_len,
        "default_sampling_params": service.ready.default_params,
        "system_fingerprint": service.ready.system_fingerprint,
        "deterministic": service.ready.guarantee,
    }


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", operation_id="tokenize")
    async def tokenize(body: protocol.TokenizeRequest) -> Response:
        """The tokens of a text or a conversation."""
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is not None:
            if body.add_special_tokens is not None:
                raise bad_request("add_special_tokens is for a prompt; templates add their own", "add_special_tokens")
            token_ids = await encode_chat(service, body.messages, AnswerPlan(service), None)
        else:
            token_ids = await service.prompts.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        tokens = [service.tokenizer.token(token_id) for token_id in token_ids]
        size = {"count": len(token_ids), "max_model_len": service.max_model_len}
        return _json({**size, "tokens": token_ids, "token_strs": tokens})

    @app.post("/detokenize", operation_id="detokenize")
    async def detokenize(body: protocol.DetokenizeRequest) -> Response:
        """The text of tokens."""
        service.check_model(body.model)
        token_ids = service.prompts.check_ids(body.tokens, "tokens")
        return _json({"prompt": service.tokenizer.decode(token_ids, skip_special_tokens=False)})

    @app.get("/tokenizer_info", operation_id="tokenizer_info")
    async def tokenizer_info() -> Response:
        """What clients that make prompts themselves ask for: special tokens by their role, the chat template."""
        tokenizer = service.tokenizer
        named = {"bos_token": None, "eos_token": None, **tokenizer.named_tokens}
        return _json({**named, "chat_template": tokenizer.chat_template, "vocab_size": tokenizer.vocab_size})


def _add_health_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health/live", operation_id="is_live")
    async def live() -> Response:
        """Whether the HTTP process is there."""
        return _json({"status": "ok"})

    @app.get("/health/ready", operation_id="is_ready", responses=_UNREADY)
    async def ready() -> Response:
        """Whether requests are served now."""
        return _health(service)

    @app.get("/health", operation_id="health", responses=_UNREADY)
    async def health() -> Response:
        """The same, with what the engine is doing."""
        engine = {
            **asdict(service.client.stats),
            "num_queued": service.admission.num_waiting,
            "num_restarts": service.client.num_restarts,
            "num_output_tokens": service.metrics.num_output_tokens,
        }
        return _health(service, engine=engine)

    @app.get("/metrics", operation_id="metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.write_text(), headers={"Content-Type": CONTENT_TYPE})


def _health(service: Service, **details: Any) -> Response:
    state = service.client.state
    status = "draining" if service.client.is_draining else str(state)
    cause = service.client.cause if state is not State.READY else None
    report = {"status": status, "model": service.model_name, "cause": cause, "version": __version__, **details}
    return _json(report, 200 if status == State.READY else 503)


class EngineCollector(Collector):
    """The state of the engine and of admission, for Prometheus."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        client, admission = self._service.client, self._service.admission
        stats = client.stats
        yield gauge("engine_ready", "1 if the engine takes requests.", int(client.state is State.READY))
        yield gauge("requests_running", "Answers that the engine computes.", stats.num_running)
        yield gauge("requests_waiting", "Requests that wait for their turn.", stats.num_waiting + admission.num_waiting)
        yield gauge("requests_open", "Requests that have been admitted.", admission.num_requests)
        yield gauge("tokens_admitted", "Tokens that open requests may take.", admission.num_tokens)
        yield gauge("kv_blocks", "Blocks of the KV cache.", stats.num_blocks)
        yield gauge("kv_blocks_used", "Blocks in use.", stats.num_blocks - stats.num_free_blocks)
        yield counter("engine_steps", "Steps since the engine's last start.", stats.num_steps)
        yield counter("preemptions", "Requests that gave up their blocks for a while.", stats.num_preemptions)
        yield counter("engine_restarts", "Restarts of the engine.", client.num_restarts)
        yield counter("log_lines_dropped", "Log lines that could not be written.", num_dropped_lines())


def _add_page(app: FastAPI) -> None:
    app.mount("/static", StaticFiles(directory=PAGE.parent, check_dir=False), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        if not PAGE.is_file():
            raise ApiError(404, "this server has no page; try /v1/models")
        return FileResponse(PAGE)
