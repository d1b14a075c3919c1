"""What the chat templates of real models write for an earlier answer, the parser reads."""

import json
from pathlib import Path
from typing import Any

import pytest
from llama_cpp_data import llama_cpp_models

from infinilm.errors import InvalidValueError
from infinilm.server.answer_events import add_up
from infinilm.server.harmony import make_parser
from infinilm.server.tool_formats import ToolFormat, detect_format, supports_tools
from infinilm.text.chat_template import ChatTemplate
from infinilm.text.reasoning import HARMONY, detect_reasoning

FORMATS = {
    **dict.fromkeys(("Bielik-11B-v3.0-Instruct", "MiMo-VL", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"), "hermes"),
    **dict.fromkeys(("Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Reka-Edge"), "hermes"),
    **dict.fromkeys(("ibm-granite-granite-4.0", "ibm-granite-granite-4.1"), "hermes"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    **dict.fromkeys(("Qwen3-Coder", "Qwen3.5-4B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"), "qwen3-coder"),
    "StepFun3.5-Flash": "qwen3-coder",
    **dict.fromkeys(("GLM-4.6", "GLM-4.7-Flash", "Spark2.5", "inclusionai-ling-3.0-flash"), "glm"),
    **dict.fromkeys(("poolside-Laguna-S-2.1", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2"), "glm"),
    **dict.fromkeys(("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"), "llama"),
    "meta-llama-Llama-3.3-70B-Instruct": "llama",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    **dict.fromkeys(("Mistral-Small-3.2-24B-Instruct-2506", "unsloth-mistral-Devstral-Small-2507"), "mistral-args"),
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral-args",
    "deepseek-ai-DeepSeek-V3.2": "deepseek-v3.2",
    **dict.fromkeys(("deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"), "deepseek-v4"),
    **dict.fromkeys(("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"), "gemma"),
    **dict.fromkeys(("Cohere2MoE", "CohereForAI-c4ai-command-r7b-12-2024-tool_use"), "cohere"),
    **dict.fromkeys(("Apriel-1.6-15b-Thinker-fixed", "unsloth-Apriel-1.5", "MiniMax-M1"), "apriel"),
    "Apertus-8B-Instruct": "apertus",
    "ByteDance-Seed-OSS": "seed",
    "GigaChat3.1-10B-A1.8B": "gigachat",
    "LFM2.5-8B-A1B": "lfm",
    "MiniMax-M2": "minimax",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "meetkai-functionary-medium-v3.1": "functionary",
    "moonshotai-Kimi-K2": "kimi",
    "openai-gpt-oss-120b": "harmony",
}
"""The templates that write calls in a known format."""
WITHOUT_EARLIER_CALLS = {
    **dict.fromkeys(("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "llama-cpp-deepseek-r1"), "deepseek-r1"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek-r1",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "LFM2-8B-A1B": "lfm",
    **dict.fromkeys(("Kimi-K2-Instruct", "Kimi-K2-Thinking"), "kimi"),
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "fireworks-ai-llama-3-firefunction-v2": "functools",
}
"""Those that show the format only in their text, or fail for a conversation like that of the test."""

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array"}, "range": {"type": "object"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Tells.", "parameters": PARAMETERS}}
ARGUMENTS = {"city": "Köln <&> 12", "days": [1.5, True, None], "range": {"low": "x\n"}}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    folder: Path = llama_cpp_models() / "templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def answer_of(source: str, message: dict[str, Any], **variables: Any) -> tuple[str, str]:
    """How the prompt before an answer ends, and what the template writes for the answer and behind it."""
    template = ChatTemplate(source)
    question = [{"role": "user", "content": "QUESTION"}]
    more: dict[str, Any] = {"special_tokens": {"bos_token": "<s>", "eos_token": "</s>"}, **variables}
    if "tools" in template._variable_names:
        more["tools"] = [TOOL]
    result = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefgh1", "content": "sunny"}
    results = [result] if "tool_calls" in message else []
    written = template.render([*question, message, *results], add_generation_prompt=False, **more)
    prompt = template.render(question, add_generation_prompt=True, **more)
    start = len(prompt) if written.startswith(prompt) else written.rindex("QUESTION") + len("QUESTION")
    return prompt, written[start:]


def parse(text: str, source: str, tool_format: ToolFormat, *, is_open: bool = False) -> Any:
    reasoning = detect_reasoning(source)
    parser = make_parser(
        tool_format,
        ["get_weather"],
        schemas={"get_weather": PARAMETERS},
        reasoning=reasoning if is_open or reasoning is HARMONY else None,
        is_reasoning=is_open,
    )
    return add_up([event for char in text for event in parser.feed(char)] + parser.finish())


def test_every_template_is_accounted_for(sources: dict[str, str]) -> None:
    for name, source in sources.items():
        expected = {**FORMATS, **WITHOUT_EARLIER_CALLS}.get(name)
        found = detect_format(source)
        assert found.name == (expected or found.name), name
        assert expected is not None or not supports_tools(source, found), name


def test_calls_that_templates_write_are_read(sources: dict[str, str]) -> None:
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    for name, format_name in FORMATS.items():
        source = sources[name]
        tool_format = detect_format(source)
        assert tool_format.name == format_name
        _, text = answer_of(source, {"role": "assistant", "content": "", "tool_calls": [call]})
        found = parse(text.removeprefix("<|end|><|start|>assistant"), source, tool_format).calls
        assert [(each.name, json.loads(each.arguments)) for each in found] == [("get_weather", ARGUMENTS)], name


REASONING = {
    **dict.fromkeys(("Qwen-Qwen3-0.6B", "Qwen3.5-4B", "GLM-4.6", "GLM-4.7-Flash", "Spark2.5"), "think"),
    **dict.fromkeys(("MiniMax-M2", "LFM2.5-8B-A1B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"), "think"),
    **dict.fromkeys(("Bielik-11B-v3.0-Instruct", "openbmb-MiniCPM5-1B", "poolside-Laguna-S-2.1"), "think"),
    **dict.fromkeys(("StepFun3.5-Flash", "inclusionai-ling-3.0-flash"), "think"),
    "ByteDance-Seed-OSS": "seed",
    "MiniMax-M3": "minimax",
    "Cohere2MoE": "cohere",
}
OTHERS = {
    "Apriel-1.6-15b-Thinker-fixed": "apriel",
    **dict.fromkeys(("HuggingFaceTB-SmolLM3-3B", "Qwen-QwQ-32B", "deepseek-ai-DeepSeek-V3.1"), "think"),
    **dict.fromkeys(("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"), "gemma"),
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "openai-gpt-oss-120b": "harmony",
    **dict.fromkeys(("Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct", "google-gemma-2-2b-it"), None),
    **dict.fromkeys(("Qwen3-Coder", "microsoft-Phi-3.5-mini-instruct"), None),
}
"""Templates that write no reasoning of the last answer, or not without a condition."""


def test_reasoning_that_templates_write_is_read(sources: dict[str, str]) -> None:
    for name, format_name in REASONING.items():
        found = detect_reasoning(sources[name])
        assert found is not None
        assert found.name == format_name
        message = {"role": "assistant", "content": "ANSWER", "reasoning_content": "REASONS"}
        prompt, text = answer_of(sources[name], message)
        is_open = prompt.rstrip().endswith(found.opening)
        if not is_open:
            text = text[text.index(found.opening) + len(found.opening) :] if found.opening in text else text
        parsed = parse(text, sources[name], detect_format(None, "plain"), is_open=True)
        assert parsed.reasoning == "REASONS", name
        assert parsed.content.startswith(("ANSWER", "<|START_TEXT|>ANSWER")), name
    for name, other in OTHERS.items():
        found = detect_reasoning(sources[name])
        assert (found and found.name) == other, name


def test_the_reasoning_parser_can_be_named() -> None:
    assert detect_reasoning("</think>", "none") is None
    assert detect_reasoning(None) is None
    named = detect_reasoning("</think>", "harmony")
    assert named is HARMONY
    with pytest.raises(InvalidValueError, match=r"reasoning_parser='qwen3' is unknown.*think.*none"):
        detect_reasoning(None, "qwen3")
