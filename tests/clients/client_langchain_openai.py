"""langchain-openai: the same calls by chat completions and by responses."""

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
    check_weather_call,
    get_weather,
    run,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

weather_tool = tool(get_weather)


def model(*, is_responses: bool, max_tokens: int) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=BASE_URL,
        api_key=KEY,
        max_tokens=max_tokens,
        use_responses_api=is_responses,
        max_retries=0,
    )


def add_calls(label: str, *, is_responses: bool) -> None:
    short = model(is_responses=is_responses, max_tokens=SHORT)
    long = model(is_responses=is_responses, max_tokens=LONG)

    @call(f"{label}: plain")
    def plain() -> None:
        check_text(short.invoke(QUESTION).text)

    @call(f"{label}: streamed")
    def streamed() -> None:
        check_pieces([str(chunk.text) for chunk in short.stream(QUESTION) if chunk.text])

    @call(f"{label}: tools, and an answer to the result")
    def tools() -> None:
        asked = [HumanMessage(QUESTION)]
        reply = long.bind_tools([weather_tool], tool_choice="required", parallel_tool_calls=False).invoke(asked)
        found = reply.tool_calls[0]
        check_weather_call(found["name"], found["args"])
        results = [ToolMessage("sunny", tool_call_id=each["id"]) for each in reply.tool_calls]
        check_text(short.invoke([*asked, reply, *results]).text)

    @call(f"{label}: tools, streamed")
    def tools_streamed() -> None:
        whole = None
        for chunk in long.bind_tools([weather_tool], tool_choice="get_weather").stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        found = whole.tool_calls[0]
        check_weather_call(found["name"], found["args"])

    @call(f"{label}: structured (schema)")
    def structured() -> None:
        check_city(long.with_structured_output(City, method="json_schema").invoke(QUESTION))

    @call(f"{label}: structured (tool)")
    def structured_by_tool() -> None:
        check_city(long.with_structured_output(City, method="function_calling").invoke(QUESTION))


add_calls("chat", is_responses=False)
add_calls("responses", is_responses=True)


@call("completion: plain")
def completion() -> None:
    check_text(OpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, max_tokens=SHORT, max_retries=0).invoke(START))


run()
