"""llm: models of extra-openai-models.yaml, by chat completions, responses and completions."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from client_calls import (
    BASE_URL,
    KEY,
    LONG,
    MODEL,
    QUESTION,
    SHORT,
    START,
    City,
    call,
    check_city,
    check_pieces,
    check_text,
    get_weather,
    run,
)

home = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = home.name
base = {"model_name": MODEL, "api_base": BASE_URL, "supports_schema": True, "supports_tools": True}
kinds = {"chat": {}, "responses": {"responses": True}, "completion": {"completion": True}}
models = [{"model_id": f"{kind}-model", **base, **extra} for kind, extra in kinds.items()]
Path(home.name, "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML

import llm  # noqa: E402 (it reads the folder above)


def add_calls(kind: str) -> None:
    def prompt(**options: Any) -> Any:
        return llm.get_model(f"{kind}-model").prompt(START if kind == "completion" else QUESTION, key=KEY, **options)

    @call(f"{kind}: plain")
    def plain() -> None:
        check_text(prompt(stream=False, max_tokens=SHORT).text())

    @call(f"{kind}: streamed")
    def streamed() -> None:
        check_pieces(list(prompt(stream=True, max_tokens=SHORT)))

    if kind == "completion":
        return

    @call(f"{kind}: structured")
    def structured() -> None:
        check_city(City.model_validate_json(prompt(stream=False, schema=City, max_tokens=LONG).text()))

    @call(f"{kind}: tools offered")
    def tools() -> None:
        model = llm.get_model(f"{kind}-model")
        check_text(model.chain(QUESTION, key=KEY, tools=[get_weather], options={"max_tokens": LONG}).text())


for each in kinds:
    add_calls(each)
run()
