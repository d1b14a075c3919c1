"""What the scripts of the clients share: a list of calls, run one after the other, with a line of JSON for each.

A script is run by the Python of an environment that has its client: `python client_litellm.py URL MODEL`.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:3]
BASE_URL = f"{URL}/v1"
KEY = "none"
QUESTION = "What is the capital of France?"
START = "The capital of France is"
LONG, SHORT = 200, 20
"""Limits of answers, in tokens: enough for a call or an object, and enough to see that text comes."""
CITIES = ("Rome", "Oslo")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": PARAMETERS}
# Clients that take no address of a server read these.
os.environ |= {"OPENAI_BASE_URL": BASE_URL, "OPENAI_API_KEY": KEY}

CALLS: dict[str, Callable[[], Any]] = {}


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # or a small model goes on with fields of its own

    name: Literal["Rome", "Oslo"]
    is_capital: bool


def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


def call(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a function to the list. It raises if the client did not get what it asked for."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CALLS[name] = function
        return function

    return add


def check_text(text: Any) -> None:
    assert isinstance(text, str), f"no text: {text!r}"
    assert text.strip(), "the text is empty"


def check_pieces(pieces: list[str]) -> None:
    assert len(pieces) > 1, f"it came in {len(pieces)} piece"
    check_text("".join(pieces))


def check_weather_call(name: str, arguments: Any) -> None:
    assert name == "get_weather", name
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert found["city"] in CITIES, found


def check_city(city: Any) -> None:
    assert isinstance(city, City), f"not a City: {city!r}"


def run() -> None:
    for name, function in CALLS.items():
        result = "ok"
        try:
            if inspect.iscoroutine(found := function()):
                asyncio.run(found)
        except Exception as error:
            traceback.print_exc()
            result = f"{type(error).__name__}: {error}"
        print(json.dumps({"call": name, "result": result}), flush=True)
