"""pydantic-ai: `openai:…`, whose API is its default, and both APIs by name."""

from client_calls import (
    LONG,
    MODEL,
    QUESTION,
    SHORT,
    City,
    call,
    check_city,
    check_pieces,
    check_text,
    get_weather,
    run,
)
from pydantic_ai import Agent, NativeOutput, ToolOutput


def add_calls(prefix: str) -> None:
    name = f"{prefix}:{MODEL}"

    @call(f"{prefix}: plain")
    async def plain() -> None:
        result = await Agent(name, instructions="Be brief.", model_settings={"max_tokens": SHORT}).run(QUESTION)
        check_text(result.output)
        assert result.usage.output_tokens > 0

    @call(f"{prefix}: streamed")
    async def streamed() -> None:
        async with Agent(name, model_settings={"max_tokens": SHORT}).run_stream(QUESTION) as result:
            check_pieces([text async for text in result.stream_text(delta=True, debounce_by=None)])

    @call(f"{prefix}: tools offered")
    async def tools() -> None:
        result = await Agent(name, tools=[get_weather], model_settings={"max_tokens": LONG}).run(QUESTION)
        check_text(result.output)

    @call(f"{prefix}: a second turn")
    async def second_turn() -> None:
        agent = Agent(name, model_settings={"max_tokens": SHORT})
        first = await agent.run(QUESTION)
        second = await agent.run("And of Italy?", message_history=first.all_messages())
        check_text(second.output)

    for label, kind in (("tool", ToolOutput), ("schema", NativeOutput)):

        @call(f"{prefix}: structured ({label})")
        async def structured(kind: type = kind) -> None:
            check_city(
                (await Agent(name, output_type=kind(City), model_settings={"max_tokens": LONG}).run(QUESTION)).output
            )


add_calls("openai")
add_calls("openai-chat")
add_calls("openai-responses")
run()
