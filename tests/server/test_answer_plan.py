"""What a request means for its prompt, its grammar and its answers, without an engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_reference, save
from tiny_tokenizer import TEMPLATE, build_tokenizer

from infinilm import Config, Reasoning, StructuredOutput
from infinilm.server import protocol
from infinilm.server.answer_events import add_up
from infinilm.server.chat import AnswerPlan
from infinilm.server.service import Service
from infinilm.server.settings import ServerSettings
from infinilm.text.detokenizer import Detokenizer

SPECIAL = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>", "<|other|>"]
SIGNS = "{# {{ tools }} <|channel|>analysis<|message|> … functions. #}{% if tools %}{{ tools | tojson }}{% endif %}"
HARMONY = TEMPLATE.replace("<assistant>", "<|start|>assistant") + SIGNS
MESSAGES = [{"role": "user", "content": "Rome?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
ANSWER = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("harmony")
    save(make_reference("llama-gqa", vocab_size=310, eos_token_id=1, bos_token_id=0), directory)
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": HARMONY}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def plan_of(directory: Path, parser: str | None = None, **fields: Any) -> tuple[Service, AnswerPlan]:
    service = Service(Config(model=directory), ServerSettings(reasoning_parser=parser))
    plan = AnswerPlan(service, protocol.ChatRequest.model_validate({"messages": MESSAGES, **fields}))
    plan.note_prompt(service.tokenizer.encode_chat(MESSAGES))
    return service, plan


def parse(service: Service, plan: AnswerPlan, text: str) -> Any:
    """Parse an answer as it comes from the engine, token by token."""
    ids = service.tokenizer.encode(text, add_special_tokens=False)
    detokenizer, parser = Detokenizer(service.tokenizer, kept_ids=plan.kept_ids), plan.make_parser()
    assert parser is not None
    events = [event for token_id in ids for event in parser.feed(detokenizer.feed([token_id]))]
    tracker = plan.make_tracker()
    for token_id in ids if tracker is not None else ():
        assert tracker is not None
        tracker.advance(token_id)
    found = add_up(events + parser.finish())
    return found.reasoning, found.content, [(c.name, c.arguments) for c in found.calls], tracker and tracker.num_tokens


def test_channels_of_an_answer(directory: Path) -> None:
    service, plan = plan_of(directory)
    assert parse(service, plan, ANSWER + "final<|message|>Hi <|other|>!") == ("hm", "Hi !", [], 2)
    call = 'commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    service, plan = plan_of(directory, tools=[TOOL])
    assert parse(service, plan, ANSWER + call)[:3] == ("hm", "", [("f", '{"a": 1}')])
    assert plan.grammar is None


def test_what_the_engine_is_told_of_channels(directory: Path) -> None:
    opening, closing, header = (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
    )
    form = StructuredOutput(json_object=True)
    base: dict[str, Any] = {"opening": opening, "closing": closing, "repeats": True}
    _, plan = plan_of(directory)
    assert plan.reasoning_of(None) is None
    assert plan.reasoning_of(form) == Reasoning(**base, forced_closing=closing + header, header=header)
    _, plan = plan_of(directory, thinking_token_budget=7)
    assert plan.reasoning_of(None) == Reasoning(**base, forced_closing=closing + header, header=header, max_tokens=7)
    _, plan = plan_of(directory, thinking_token_budget=7, tools=[TOOL], tool_choice="required")
    assert plan.grammar is not None
    assert plan.reasoning_of(form) == Reasoning(**base, forced_closing=closing, max_tokens=7)


def test_reasoning_can_stay_in_the_text(directory: Path) -> None:
    service, plan = plan_of(directory, "none")
    assert service.reasoning is None
    assert plan.make_parser() is None
    assert plan.kept_ids == set()
    service, plan = plan_of(directory, "think")
    assert parse(service, plan, "<think>hm</think>Yes")[:2] == ("hm", "Yes")
