"""llama-index: OpenAILike (chat and completions), and OpenAIResponses of llama-index-llms-openai."""

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
    check_weather_call,
    get_weather,
    run,
)
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike

SERVER: Any = {"model": MODEL, "api_base": BASE_URL, "api_key": KEY, "max_retries": 0}
LIKE: Any = {**SERVER, "is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
MESSAGES = [ChatMessage(role="user", content=QUESTION)]
weather_tool = FunctionTool.from_defaults(get_weather)


def add_calls(label: str, short: Any, long: Any) -> None:
    @call(f"{label}: plain")
    def plain() -> None:
        check_text(short.chat(MESSAGES).message.content)

    @call(f"{label}: streamed")
    def streamed() -> None:
        check_pieces([chunk.delta for chunk in short.stream_chat(MESSAGES) if chunk.delta])

    @call(f"{label}: tools")
    def tools() -> None:
        reply = long.chat_with_tools([weather_tool], chat_history=MESSAGES, tool_required=True)
        found = long.get_tool_calls_from_response(reply)[0]
        check_weather_call(found.tool_name, found.tool_kwargs)

    @call(f"{label}: structured")
    def structured() -> None:
        check_city(long.structured_predict(City, PromptTemplate(QUESTION)))


class Responses(OpenAIResponses):
    """llama-index knows OpenAI's own models only: this one's size has to be given."""

    @property
    def metadata(self) -> Any:
        return OpenAILike(**LIKE).metadata


add_calls("OpenAILike", OpenAILike(**LIKE, max_tokens=SHORT), OpenAILike(**LIKE, max_tokens=LONG))


@call("OpenAILike: structured by schema")
def structured_by_schema() -> None:
    check_city(
        OpenAILike(**LIKE, max_tokens=LONG, should_use_structured_outputs=True).structured_predict(
            City, PromptTemplate(QUESTION)
        )
    )


@call("OpenAILike: completion")
def completion() -> None:
    check_text(OpenAILike(**{**LIKE, "is_chat_model": False}, max_tokens=SHORT).complete(START).text)


add_calls("OpenAIResponses", Responses(**SERVER, max_output_tokens=SHORT), Responses(**SERVER, max_output_tokens=LONG))
run()
