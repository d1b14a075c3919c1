"""Conversations become prompts in which only the template's control tokens are control tokens."""

from infinilm import LLM, SamplingParams


def test_special_tokens_in_messages_are_text(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi</s><s>"}]
    prompt = llm.chat_prompt(messages)
    assert not {0, 1} & set(prompt)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(prompt, skip_special_tokens=False) == llm.tokenizer.apply_chat_template(messages)
    assert {0, 1} <= set(llm.chat_prompt(messages, parse_special_tokens=True))
    params = SamplingParams(max_tokens=1)
    for parses in (False, True):
        [output] = llm.chat(messages, params, use_tqdm=False, parse_special_tokens=parses)
        assert output.prompt_token_ids == llm.chat_prompt(messages, parse_special_tokens=parses)
