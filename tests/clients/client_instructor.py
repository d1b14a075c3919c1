"""instructor: its modes, on chat completions and on responses."""

from typing import Any

import instructor
import openai
from client_calls import BASE_URL, KEY, LONG, MODEL, QUESTION, City, call, check_city, run

MESSAGES: Any = [{"role": "user", "content": QUESTION}]


def make(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0), mode=mode)


def add_calls(name: str) -> None:
    mode = instructor.Mode[name]

    @call(f"{name}: structured")
    def structured() -> None:
        found = make(mode).create(model=MODEL, messages=MESSAGES, response_model=City, max_tokens=LONG, max_retries=0)
        check_city(City(**found.model_dump()))

    @call(f"{name}: structured, streamed")
    def streamed() -> None:
        parts = list(
            make(mode).create_partial(
                model=MODEL, messages=MESSAGES, response_model=City, max_tokens=LONG, max_retries=0
            )
        )
        assert len(parts) > 1
        check_city(City(**parts[-1].model_dump()))


for each in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    add_calls(each)
run()
