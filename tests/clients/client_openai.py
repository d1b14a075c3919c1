"""The official client."""

from typing import Any

import openai
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

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS: Any = [{"type": "function", "strict": True, **FUNCTION}]
ONE_CALL: Any = {"tool_choice": "required", "parallel_tool_calls": False}
CALLING: Any = {"tools": FLAT_TOOLS, **ONE_CALL, "max_output_tokens": LONG}


@call("chat: plain")
def chat() -> None:
    check_text(
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=SHORT).choices[0].message.content
    )


@call("chat: streamed")
def chat_streamed() -> None:
    chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=SHORT, stream=True)
    check_pieces([text for chunk in chunks if (text := chunk.choices[0].delta.content)])


@call("chat: tools")
def chat_tools() -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, **ONE_CALL, max_tokens=LONG)
    function = reply.choices[0].message.tool_calls[0].function
    check_weather_call(function.name, function.arguments)


@call("chat: structured")
def chat_structured() -> None:
    reply = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City, max_tokens=LONG)
    check_city(reply.choices[0].message.parsed)


@call("completion: plain")
def completion() -> None:
    check_text(client.completions.create(model=MODEL, prompt=START, max_tokens=SHORT).choices[0].text)


@call("responses: plain")
def responses() -> None:
    check_text(client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=SHORT).output_text)


@call("responses: streamed")
def responses_streamed() -> None:
    events = list(client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=SHORT, stream=True))
    check_pieces([event.delta for event in events if event.type == "response.output_text.delta"])


@call("responses: tools, and an answer to the result")
def responses_tools() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, **CALLING)
    item = first.output[0]
    check_weather_call(item.name, item.arguments)
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
    items: Any = [*MESSAGES, *first.output, result]
    check_text(client.responses.create(model=MODEL, input=items, max_output_tokens=SHORT).output_text)


@call("responses: tools, streamed")
def responses_tools_streamed() -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, **CALLING) as stream:
        kinds = [event.type for event in stream]
        item = stream.get_final_response().output[0]
    assert "response.function_call_arguments.delta" in kinds
    check_weather_call(item.name, item.arguments)


@call("responses: structured")
def responses_structured() -> None:
    check_city(
        client.responses.parse(model=MODEL, input=QUESTION, text_format=City, max_output_tokens=LONG).output_parsed
    )


run()
