"""The formats in which models write tool calls, and which of them a chat template uses."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from infinilm.checks import check_choice
from infinilm.server.call_syntax import CallSyntax, GemmaCall, JsonCall, NamedCall, PythonCall, TaggedCall

_JSON = JsonCall()


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls: each in the form of `syntax`, between markers."""

    name: str
    opening: str
    """The marker before calls."""
    closing: str
    """The marker after calls; empty if there is none."""
    layout: tuple[str, str, str]
    """The text before the first call, between two, and after the last, including markers."""
    syntax: CallSyntax = _JSON
    may_be_bare: bool = False
    """Whether an answer may begin with a call, without the opening marker."""
    is_parallel: bool = True
    """Whether one answer may hold several calls."""
    is_parsed: bool = True
    """Whether the server looks for calls in answers."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that must reach the parser, even if they hold special tokens."""
        own = [] if isinstance(self.syntax, JsonCall) else [value for value in vars(self.syntax).values() if value]
        return tuple(marker for marker in (self.opening, self.closing, *own) if marker)

    def write_call(self, name: str, arguments: str) -> str:
        """Write one call without markers; `arguments` is JSON."""
        return self.syntax.write(name, arguments)

    def write_answer(self, calls: Sequence[str]) -> str:
        """Write calls (see `write_call`) with markers, as an example for the model."""
        before, between, after = self.layout
        return before + between.join(calls) + after


def _tagged(
    name: str, opening: str, closing: str, syntax: CallSyntax, *, is_in_one: bool = False, **others: bool
) -> ToolFormat:
    """A format with a pair of markers for each call, or with all calls in one pair."""
    between = "\n" if is_in_one else f"\n{closing}\n{opening}\n"
    return ToolFormat(name, opening, closing, (f"{opening}\n", between, f"\n{closing}"), syntax, **others)


def _list(name: str, opening: str, closing: str, syntax: CallSyntax = _JSON, **others: bool) -> ToolFormat:
    """A format with a list of calls between markers."""
    return ToolFormat(name, opening, closing, (f"{opening}[", ", ", f"]{closing}"), syntax, **others)


def _function_tags(head: str, parameter: str, after: str, pad: str = "") -> TaggedCall:
    """`head`NAME`after`, then parameters; closing tags repeat the opening ones without attributes."""
    function, key = (re.split("[= ]", tag)[0].replace("<", "</") + ">" for tag in (head, parameter))
    return TaggedCall(head, after, parameter, after, key, function, pad)


HERMES = _tagged("hermes", "<tool_call>", "</tool_call>", _JSON)
"""Hermes, Qwen 2.5 and 3, Granite 4 and many others: one pair of tags for each call."""

SMOLLM = _list("smollm", "<tool_call>", "</tool_call>")
"""SmolLM2: a list of calls within one pair of tags."""

LLAMA = ToolFormat(
    "llama", "<|python_tag|>", "", ("", "\n", ""), JsonCall("parameters"), may_be_bare=True, is_parallel=False
)
"""Llama 3.1 to 3.3: the answer is the call. Their templates refuse conversations with two calls in one answer."""

PYTHONIC = ToolFormat(
    "pythonic", "<|python_start|>", "<|python_end|>", ("[", ", ", "]"), PythonCall(), may_be_bare=True
)
"""Llama 4 and Llama 3.2, if the template asks for Python: the answer is a list of calls."""

LFM = _list("lfm", "<|tool_call_start|>", "<|tool_call_end|>", PythonCall())
"""LFM2: a list of calls in Python."""

MISTRAL = _list("mistral", "[TOOL_CALLS]", "")
"""Mistral up to Nemo and Small 3.1: a marker and a list."""

MISTRAL_ARGS = ToolFormat(
    "mistral-args", "[TOOL_CALLS]", "", ("[TOOL_CALLS]", "[TOOL_CALLS]", ""), NamedCall("", "[ARGS]")
)
"""Mistral Small 3.2, Devstral, Ministral 3: a marker, the name, another marker, the arguments."""

QWEN_CODER = _tagged(
    "qwen3-coder", "<tool_call>", "</tool_call>", _function_tags("<function=", "<parameter=", ">", "\n")
)
"""Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5: a tag for each argument."""

SEED = _tagged("seed", "<seed:tool_call>", "</seed:tool_call>", _function_tags("<function=", "<parameter=", ">"))
"""Seed-OSS."""

MINIMAX = _tagged(
    "minimax",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    _function_tags('<invoke name="', '<parameter name="', '">'),
    is_in_one=True,
)
"""MiniMax-M2."""

GLM = ToolFormat(
    "glm",
    "<tool_call>",
    "",
    ("<tool_call>", "\n<tool_call>", ""),
    TaggedCall("", "", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>"),
)
"""GLM-4.5 and later, Ling, Spark, Laguna: the name, then tags for keys and values."""

DEEPSEEK_R1 = ToolFormat(
    "deepseek-r1",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    NamedCall("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
)
"""DeepSeek V3 and R1."""

DEEPSEEK = ToolFormat(
    "deepseek",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    NamedCall("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)
"""DeepSeek V3.1."""

_DSML = TaggedCall(
    '<｜DSML｜invoke name="', '">', '<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>", "</｜DSML｜invoke>"
)
DEEPSEEK_32 = _tagged("deepseek-v3.2", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _DSML, is_in_one=True)
"""DeepSeek V3.2."""

DEEPSEEK_4 = _tagged("deepseek-v4", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", _DSML, is_in_one=True)
"""DeepSeek V4."""

KIMI = ToolFormat(
    "kimi",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    NamedCall("<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>", ":0"),
)
"""Kimi K2."""

GEMMA = ToolFormat(
    "gemma",
    "<|tool_call>",
    "<tool_call|>",
    ("<|tool_call>", "<tool_call|><|tool_call>", "<tool_call|>"),
    GemmaCall('<|"|>'),
)
"""Gemma 4."""

FUNCTION_GEMMA = ToolFormat(
    "functiongemma",
    "<start_function_call>",
    "<end_function_call>",
    ("<start_function_call>", "<end_function_call><start_function_call>", "<end_function_call>"),
    GemmaCall("<escape>"),
)
"""FunctionGemma."""

GRANITE = _list("granite", "<|tool_call|>", "")
"""Granite 3: a marker and a list."""

PHI = _list("phi", "<|tool_call|>", "<|/tool_call|>")
"""Phi-4-mini."""

NEMOTRON = _list("nemotron", "<TOOLCALL>", "</TOOLCALL>")
"""Nemotron Nano 2."""

APRIEL = _list("apriel", "<tool_calls>", "</tool_calls>")
"""Apriel, MiniMax-M1."""

COHERE = _list("cohere", "<|START_ACTION|>", "<|END_ACTION|>", JsonCall("parameters", "tool_name"))
"""Command R7B and later."""

APERTUS = _list("apertus", "<|tools_prefix|>", "<|tools_suffix|>", NamedCall('{"', '":', "}"))
"""Apertus: the function's name is the key."""

GIGACHAT = ToolFormat("gigachat", "<|function_call|>", "", ("<|function_call|>", "", ""), is_parallel=False)
"""GigaChat 3.1."""

FUNCTOOLS = _list("functools", "functools", "")
"""Firefunction v2."""

FUNCTIONARY = ToolFormat(
    "functionary", "<function=", "", ("<function=", "<function=", ""), NamedCall("", ">", "</function>")
)
"""Functionary 3.1, and Llama 3.1 if the template asks for such tags."""

HARMONY = ToolFormat(
    "harmony",
    "<|channel|>commentary to=functions.",
    "",
    ("<|channel|>commentary to=functions.", "", ""),
    NamedCall("", "<|message|>", "<|call|>", " <|constrain|>json"),
    is_parallel=False,
)
"""GPT-OSS: a message to the function. `harmony.py` reads all messages of an answer."""

PLAIN = _tagged("plain", "<tool_call>", "</tool_call>", _JSON, is_parsed=False)
"""Calls stay in the text, for clients that parse it themselves."""

FORMATS = {
    each.name: each
    for each in (
        *(HERMES, SMOLLM, LLAMA, PYTHONIC, LFM, MISTRAL, MISTRAL_ARGS, QWEN_CODER, SEED, MINIMAX, GLM, DEEPSEEK_R1),
        *(DEEPSEEK, DEEPSEEK_32, DEEPSEEK_4, KIMI, GEMMA, FUNCTION_GEMMA, GRANITE, PHI, NEMOTRON, APRIEL, COHERE),
        *(APERTUS, GIGACHAT, FUNCTOOLS, FUNCTIONARY, HARMONY, PLAIN),
    )
}

# Patterns in a template's text that identify its format, the surest first: some formats share a marker.
_SIGNS = (
    (re.compile(r"<\|channel\|>(?s:.*)<\|message\|>(?s:.*)functions\."), HARMONY),
    (re.compile(r"\[TOOL_CALLS\] ?\["), MISTRAL),
    (re.compile(r"\[TOOL_CALLS\](?s:.*)\[ARGS\]"), MISTRAL_ARGS),
    (re.compile(r'"name": function name, "parameters":'), LLAMA),
    (re.compile(r"\[func_name1\(params_name1="), PYTHONIC),
    (re.compile(r"<\|tool_call_start\|>|<\|tool_list_start\|>"), LFM),
    (re.compile(r"<\|?tool_call\|?>(?s:.*)<arg_key>"), GLM),
    (re.compile(r"<seed:tool_call>(?s:.*)<parameter="), SEED),
    (re.compile(r"<minimax:tool_call>"), MINIMAX),
    (re.compile(r"<tool_call>(?s:.*)<function=(?s:.*)<parameter="), QWEN_CODER),
    (
        re.compile(r"｜tool▁calls▁begin｜(?s:.*)function<｜tool▁sep｜>|｜tool▁call▁begin｜>' *\+ *tool\['type'\]"),
        DEEPSEEK_R1,
    ),
    (re.compile(r"｜tool▁calls▁begin｜"), DEEPSEEK),
    (re.compile(r"｜DSML｜(?s:.*)function_calls"), DEEPSEEK_32),
    (re.compile(r"｜DSML｜(?s:.*)tool_calls"), DEEPSEEK_4),
    (re.compile(r"<\|tool_calls_section_begin\|>"), KIMI),
    (re.compile(r"<\|tool_call>call:"), GEMMA),
    (re.compile(r"<start_function_call>"), FUNCTION_GEMMA),
    (re.compile(r"<\|/tool_call\|>|<\|/tool\|>"), PHI),
    (re.compile(r"<\|tool_call\|>"), GRANITE),
    (re.compile(r"<TOOLCALL>"), NEMOTRON),
    (re.compile(r"<\|START_ACTION\|>"), COHERE),
    (re.compile(r"<\|tools_prefix\|>"), APERTUS),
    (re.compile(r"<\|function_call\|>"), GIGACHAT),
    (re.compile(r"functools\["), FUNCTOOLS),
    (re.compile(r"<function=(?s:.*)</function>"), FUNCTIONARY),
    (re.compile(r"<tool_calls>"), APRIEL),
    (re.compile(r"<tool_call>(?:\\n|\s)*\["), SMOLLM),
    (re.compile(r'<tool_call>(?!</tool_call>)(?s:.*)arguments\\?"'), HERMES),
)
# SmolLM2's template does not mention tools; its model card says how the model was trained to call them.
_SMOLLM_NAME = "named SmolLM, trained by Hugging Face"

_TEMPLATE_CODE = re.compile(r"\{[{%](?s:.*?)[%}]\}")
_TEMPLATE_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_TOOLS_VARIABLE = re.compile(r"(?<![\w.])tools\b(?!\s*=[^=])")


def detect_format(chat_template: str | None, override: str | None = None) -> ToolFormat:
    """Return the format for a model with this chat template, or the one that `override` names.

    If the template shows no known format, it is Hermes: `prepare_messages` then describes it to the model.
    """
    if override is not None:
        check_choice("tool_call_parser", override, tuple(FORMATS))
        return FORMATS[override]
    template = chat_template or ""
    for sign, tool_format in _SIGNS:
        if sign.search(template):
            return tool_format
    return SMOLLM if _SMOLLM_NAME in template else HERMES


def supports_tools(chat_template: str | None, tool_format: ToolFormat) -> bool:
    """Whether the template itself tells the model about `tools`, and in this format.

    A template that reads `tools` but asks for calls in an unknown format does not count: they could not be parsed.
    """
    template = chat_template or ""
    code = " ".join(_TEMPLATE_CODE.findall(template))
    if not _TOOLS_VARIABLE.search(_TEMPLATE_STRING.sub("''", code)):
        return False
    if not tool_format.is_parsed:
        return True
    detected = detect_format(template)
    is_same = detected.markers == tool_format.markers and type(detected.syntax) is type(tool_format.syntax)
    return is_same and any(sign.search(template) for sign, found in _SIGNS if found is detected)
