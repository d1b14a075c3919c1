"""Tool calls as text: how models are told of tools, how they are made to call them, and how calls are found.

Once per model: `detect_format` and `supports_tools`. Once per request: `check_tool_request`, `prepare_messages` (the
prompt) and `call_grammar` (the constraint, if there is one). Once per answer, if any function may be called: a
`ToolCallParser`.
"""

from infinilm.server.tools.choice import FunctionTool, ToolRequest, check_tool_request
from infinilm.server.tools.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ParsedAnswer,
    ToolCall,
    ToolCallStart,
    add_up,
)
from infinilm.server.tools.formats import FORMATS, ToolFormat, detect_format, supports_tools
from infinilm.server.tools.grammar import call_grammar
from infinilm.server.tools.messages import prepare_messages
from infinilm.server.tools.parser import ToolCallParser, parse_answer

__all__ = [
    "FORMATS",
    "ArgumentsDelta",
    "ContentDelta",
    "Event",
    "FunctionTool",
    "ParsedAnswer",
    "ToolCall",
    "ToolCallParser",
    "ToolCallStart",
    "ToolFormat",
    "ToolRequest",
    "add_up",
    "call_grammar",
    "check_tool_request",
    "detect_format",
    "parse_answer",
    "prepare_messages",
    "supports_tools",
]
