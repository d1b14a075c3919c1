"""A chat template that goes in circles is broken off."""

from time import perf_counter

import pytest

from infinilm.errors import InvalidValueError
from infinilm.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "a"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
CALLER = (
    "{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call twice() %}" * 40
    + "x"
    + "{% endcall %}" * 40
)


@pytest.mark.parametrize("source", [LOOP, MACRO, CALLER], ids=["loop", "macro", "caller"])
def test_endless_templates_are_broken_off(source: str) -> None:
    template = ChatTemplate(source, max_seconds=0.2)
    start = perf_counter()
    with pytest.raises(InvalidValueError, match=r"takes more than 0\.2 s"):
        template.render(MESSAGES)
    assert perf_counter() - start < 5


def test_the_check_is_not_a_variable_of_the_template() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ _check_time is defined }}{% endfor %}"
    with pytest.raises(TypeError, match="does not use '_check_time'"):
        ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").render(MESSAGES, _check_time=1)
    assert ChatTemplate(source).render(MESSAGES).startswith("a")
