"""litellm: `openai/…` for chats, and its own `responses`."""

from typing import Any

import litellm
from client_calls import (
    BASE_URL,
    FUNCTION,
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
    check_weather_call,
    run,
)

SERVER: Any = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY}
MESSAGES = [{"role": "user", "content": QUESTION}]
litellm.enable_json_schema_validation = True


@call("chat: plain")
def chat() -> None:
    check_text(litellm.completion(**SERVER, messages=MESSAGES, max_tokens=SHORT).choices[0].message.content)


@call("chat: streamed")
def chat_streamed() -> None:
    chunks = litellm.completion(**SERVER, messages=MESSAGES, max_tokens=SHORT, stream=True)
    check_pieces([text for chunk in chunks if (text := chunk.choices[0].delta.content)])


@call("chat: tools")
def chat_tools() -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    reply = litellm.completion(**SERVER, messages=MESSAGES, tools=tools, tool_choice="required", max_tokens=LONG)
    function = reply.choices[0].message.tool_calls[0].function
    check_weather_call(function.name, function.arguments)


@call("chat: structured")
def chat_structured() -> None:
    reply = litellm.completion(**SERVER, messages=MESSAGES, response_format=City, max_tokens=LONG)
    check_city(City.model_validate_json(reply.choices[0].message.content))


@call("completion: plain")
def completion() -> None:
    server = {**SERVER, "model": f"text-completion-openai/{MODEL}"}
    check_text(litellm.text_completion(**server, prompt=START, max_tokens=SHORT).choices[0].text)


@call("responses: plain")
def responses() -> None:
    reply = litellm.responses(**SERVER, input=QUESTION, max_output_tokens=SHORT)
    check_text(reply.output[0].content[0].text)


@call("responses: streamed")
def responses_streamed() -> None:
    events = list(litellm.responses(**SERVER, input=QUESTION, max_output_tokens=SHORT, stream=True))
    check_pieces([event.delta for event in events if event.type == "response.output_text.delta"])


@call("responses: tools")
def responses_tools() -> None:
    tools = [{"type": "function", **FUNCTION}]
    item = litellm.responses(
        **SERVER, input=QUESTION, tools=tools, tool_choice="required", max_output_tokens=LONG
    ).output[0]
    check_weather_call(item.name, item.arguments)


@call("responses: structured")
def responses_structured() -> None:
    reply = litellm.responses(**SERVER, input=QUESTION, text_format=City, max_output_tokens=LONG)
    check_city(City.model_validate_json(reply.output[0].content[0].text))


run()
