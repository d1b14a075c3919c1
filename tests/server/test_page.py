"""The page at `/`: its files, and the page itself in a real browser."""

import json
import math
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest
from server_driver import Server, serving, wait_until

import infinilm.server
from infinilm.loading.sources import DEFAULT_MODEL

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Route

STATIC = Path(infinilm.server.__file__).parent / "static"
FILES = sorted(STATIC.iterdir())
SCRIPTS = sorted(STATIC.glob("*.js"))
HTML = (STATIC / "index.html").read_text(encoding="utf-8")
IDS = re.findall(r'\bid="([^"]+)"', HTML)
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

KEY = "the-key-of-the-page"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SWITCHES = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
TIMEOUT_MS = 10_000

WRITTEN = """# Heading
Some **bold** words, `code` and a naïve 🙂.

- one
- <img src=x onerror=alert(1)>

```python
def f(x):

    return x ** 2
```
1. done"""
"""What a model might write; the server makes it write just that."""

RICH = """> A *quote* with a [link](https://example.org/a?b=c), [mail](mailto:a@example.org) and https://example.org/bare.

| name | size |
|:-----|-----:|
| one | 1.5 |
| `two` | <b>2</b> |

after
```python
def f(x):  # a remark
    return "text", 12
```"""

HOSTILE = """<script>document.title = "run"</script><img src=x onerror="document.title='run'">
[a](javascript:document.title='run') [b](data:text/html,<script>1</script>) [c](JaVaScRiPt:x) [d](/relative) [e](//host)
[f](vbscript:x) <a href="javascript:x">g</a> [h](https://x.org/"onclick="x) ![i](https://example.org/i.png)

| <img src=x onerror=x> | b |
|---|---|
| <svg onload=x> | [j](javascript:x) |

> <iframe src="javascript:x"></iframe>

```html"><img src=x>
<script>alert(1)</script>
```"""


# --- the files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_served_as_what_it_is(server: Server, file: Path) -> None:
    response = server.http.get("/" if file.name == "index.html" else f"/static/{file.name}")
    assert response.status_code == 200
    assert response.headers["content-type"].partition(";")[0] == TYPES[file.suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'; style-src 'self'" in policy
    assert response.content == file.read_bytes()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_needs_nothing_from_elsewhere_and_reads_no_text_as_code(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.findall(r"(?:https?:|wss?:|[\"'(])//", text)
    assert len(text.splitlines()) <= 400
    if file.suffix == ".js":
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    if file.suffix == ".html":
        assert not re.findall(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", text)


def test_the_banner_names_the_page(server: Server) -> None:
    wait_until(lambda: any(line.startswith("chat page") and f" {server.url}/ " in line for line in server.log))


def test_references_lead_somewhere() -> None:
    assert len(IDS) == len(set(IDS))
    code = "".join(script.read_text(encoding="utf-8") for script in SCRIPTS)
    used = set(re.findall(r'byId\("([^"]+)"\)', code))
    assert len(used) > 20
    pointed_at = set(re.findall(r'\b(?:for|aria-controls|data-for)="([^"]+)"', HTML))
    assert (used | pointed_at) - set(IDS) == set()
    imported = set(re.findall(r'from "\./([^"]+)"', code))
    linked = set(re.findall(r'(?:src|href)="static/([^"]+)"', HTML))
    assert imported | linked == {file.name for file in FILES} - {"index.html"}


def test_all_fields_have_labels() -> None:
    labelled = set(re.findall(r'<label[^>]*\bfor="([^"]+)"', HTML)) | {"tint"}  # which stands in its label
    fields = re.findall(r"<(?:input|textarea)\b[^>]*>", HTML)
    unlabelled = [field for field in fields if not set(re.findall(r'\bid="([^"]+)"', field)) & labelled]
    assert len(fields) > 12
    assert all('aria-hidden="true"' in field for field in unlabelled)


# --- in a browser ------------------------------------------------------------------------------------------


def write_events(text: str) -> str:
    """A streamed answer as a server sends it, with tokens of up to five characters."""
    events: list[dict[str, Any]] = []
    for part in re.findall(r"(?s).{1,5}", text):
        token = {"token": part, "logprob": -0.5, "bytes": list(part.encode()), "top_logprobs": []}
        events.append({"choices": [{"delta": {"content": part}, "logprobs": {"content": [token]}}]})
    events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    events.append({"choices": [], "usage": {"completion_tokens": len(events) - 1}})
    return "".join(f"data: {data}\n\n" for data in (*map(json.dumps, events), "[DONE]"))


class Visit:
    """A page that is open: what it asks the server for, and what it complains about."""

    def __init__(self, page: "Page", url: str, **forced: Any) -> None:
        self.page = page
        self.bodies: list[dict[str, Any]] = []
        """The chat requests, as the page made them."""
        self.forced = forced
        """What is added to them on their way."""
        self.answer: str | None = None
        """What chat requests are answered with, instead of by the server."""
        self.accepted_status: int | None = None
        self._origin = url
        self._complaints: list[str] = []
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self._complaints.append(str(error)))
        page.on("request", self._see)
        page.route("**/v1/chat/completions", self._pass_on)
        page.goto(url)

    def _hear(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning") and f"status of {self.accepted_status}" not in message.text:
            self._complaints.append(message.text)

    def _see(self, request: "Request") -> None:
        if urlsplit(request.url).netloc != urlsplit(self._origin).netloc:
            self._complaints.append(f"{request.url} is elsewhere")

    def _pass_on(self, route: "Route") -> None:
        self.bodies.append(json.loads(route.request.post_data or ""))
        if self.answer is None:
            route.continue_(post_data=json.dumps({**self.bodies[-1], **self.forced}))
        else:
            route.fulfill(content_type="text/event-stream", body=write_events(self.answer))

    def check(self) -> None:
        assert self._complaints == []

    def send(self, text: str) -> None:
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")

    def wait(self, condition: str, seconds: float = 10.0) -> None:
        """Until some JavaScript is true. Playwright's own way to wait is eval, which the page's policy forbids."""
        wait_until(lambda: self.page.evaluate(condition), seconds)

    def wait_for_end(self) -> None:
        self.page.wait_for_selector("#send", state="visible")

    def text_of_answer(self) -> str:
        return self.page.locator(".answer").last.text_content() or ""

    def number_of(self, selector: str) -> int:
        return self.page.locator(selector).count()


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)


@pytest.fixture
def visit(browser: "Browser", server: Server, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """The page at some size. Nothing may be complained about."""
    options = getattr(request, "param", {"viewport": DESKTOP})
    context = browser.new_context(**options)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened = Visit(context.new_page(), server.url)
    yield opened
    opened.check()
    context.close()
    wait_until(server.is_empty)


def test_an_answer_and_its_probabilities(visit: Visit, server: Server) -> None:
    page = visit.page
    page.fill("#max_tokens", "40")
    page.fill("#seed", "7")
    page.fill("#top_logprobs", "3")
    visit.forced = {"ignore_eos": True}
    visit.send("Hello")
    visit.wait_for_end()
    (body,) = visit.bodies
    whole = {**body, **visit.forced, "stream": False}
    del whole["stream_options"]
    choice = server.post("/v1/chat/completions", **whole).json()["choices"][0]
    assert visit.text_of_answer() == choice["message"]["content"]
    assert "40 tokens" in page.inner_text(".note")
    assert "cut off at max tokens" in page.inner_text(".note")
    first = choice["logprobs"]["content"][0]
    page.locator(".token").first.hover()
    shown = float(page.inner_text("#popover .chosen strong").removesuffix(" %"))
    assert shown == pytest.approx(100 * math.exp(first["logprob"]), abs=0.05)
    others = [float(text.removesuffix(" %")) for text in page.locator("#popover li > :last-child").all_inner_texts()]
    assert others == pytest.approx([100 * math.exp(each["logprob"]) for each in first["top_logprobs"]], abs=0.05)
    assert len(others) == 3


def test_markup_is_shown_and_never_run(visit: Visit) -> None:
    page = visit.page
    page.fill("#max_tokens", "400")
    visit.forced = {"guided_choice": [WRITTEN]}
    visit.send("Write it")
    visit.wait_for_end()
    assert visit.text_of_answer() == WRITTEN
    assert page.eval_on_selector_all(".answer img", "found => found.length") == 0
    shown = page.inner_text(".answer")
    assert "Heading\nSome bold words, code and a naïve 🙂." in shown
    assert "```" not in shown
    assert visit.number_of(".line.bullet") == 2
    assert visit.number_of(".line.numbered") == 1
    assert page.get_attribute(".code-block", "data-language") == "python"
    page.click(".copy-code")
    page.wait_for_selector(".copy-code.done")
    assert page.evaluate("navigator.clipboard.readText()") == "def f(x):\n\n    return x ** 2\n"
    page.click(".copy")
    page.wait_for_selector(".copy.done")
    assert page.evaluate("navigator.clipboard.readText()") == WRITTEN
    page.check("#tint")
    assert "```" in page.inner_text(".answer")
    assert page.evaluate("getComputedStyle(document.querySelector('.token')).backgroundColor") != "rgba(0, 0, 0, 0)"


def test_tables_quotes_links_and_colours(visit: Visit) -> None:
    page = visit.page
    visit.answer = RICH
    visit.send("Write it")
    visit.wait_for_end()
    assert visit.text_of_answer() == RICH
    assert page.inner_text(".line.quote").startswith("A quote with a link, mail and https:")
    links = page.eval_on_selector_all(".answer a", "all => all.map((a) => [a.href, a.rel, a.target])")
    targets = ["https://example.org/a?b=c", "mailto:a@example.org", "https://example.org/bare"]
    assert list(dict.fromkeys(href for href, _, _ in links)) == targets
    assert {(rel, target) for _, rel, target in links} == {("noopener noreferrer", "_blank")}
    cells = page.eval_on_selector_all(
        ".row", "rows => rows.map((row) => [...row.children].map((c) => c.innerText.trim()))"
    )
    assert cells == [["name", "size"], ["one", "1.5"], ["two", "<b>2</b>"]]
    assert page.evaluate("getComputedStyle(document.querySelectorAll('.cell')[3]).textAlign") == "right"
    assert page.locator(".table + .line, .table ~ .line.text").first.inner_text() in ("", "after")
    coloured = {
        kind: "".join(page.locator(f".code-{kind}").all_inner_texts())
        for kind in ("keyword", "name", "comment", "string", "number")
    }
    assert coloured == {
        "keyword": "defreturn",
        "name": "f",
        "comment": "# a remark",
        "string": '"text"',
        "number": "12",
    }


def test_hostile_markup_stays_text(visit: Visit) -> None:
    page = visit.page
    visit.answer = HOSTILE
    visit.send("Write it")
    visit.wait_for_end()

    def check() -> None:
        assert visit.text_of_answer() == HOSTILE
        tags = page.eval_on_selector_all(".answer *", "all => [...new Set(all.map((each) => each.tagName))].sort()")
        assert tags == ["A", "BUTTON", "DIV", "SPAN"]
        links = page.eval_on_selector_all(".answer a", "all => [...new Set(all.map((a) => a.getAttribute('href')))]")
        assert links == ["https://x.org/%22onclick=%22x", "https://example.org/i.png"]
        attributes = page.eval_on_selector_all(
            ".answer *", "all => [...new Set(all.flatMap((each) => each.getAttributeNames()))].sort()"
        )
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style")]
        assert page.title() == "tiny-model – infinilm"

    check()
    page.reload()  # the same from the store
    page.wait_for_selector(".answer")
    visit.wait("document.title.startsWith('tiny-model')")
    check()


def test_chats_survive_a_reload_and_can_be_deleted(visit: Visit) -> None:
    page = visit.page
    for question, visit.answer in (("First", "**one**"), ("Second", "two")):
        page.click("#new-chat")
        visit.send(question)
        visit.wait_for_end()
    assert page.locator(".open-chat").all_inner_texts() == ["Second", "First"]
    note = page.inner_text(".note")
    page.reload()
    page.wait_for_selector(".answer")
    assert (visit.text_of_answer(), page.inner_text(".note")) == ("two", note)
    page.click(".open-chat >> text=First")
    assert visit.text_of_answer() == "**one**"
    assert page.inner_text(".answer") == "one"
    visit.answer = "three"
    visit.send("Again")
    visit.wait_for_end()
    turns = [("user", "First"), ("assistant", "**one**"), ("user", "Again")]
    assert visit.bodies[-1]["messages"] == [{"role": role, "content": content} for role, content in turns]
    assert page.locator(".open-chat").all_inner_texts() == ["First", "Second"]

    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("#welcome", state="visible")  # a new tab begins a chat of its own
    item = other.locator("li", has_text="Second")
    item.hover()
    item.locator(".delete").click()
    assert other.locator(".open-chat").count() == 2, "it asks first"
    item.locator(".delete").click()
    assert other.locator(".open-chat").all_inner_texts() == ["First"]
    visit.wait("document.querySelectorAll('.open-chat').length === 1")  # in this tab, too
    page.hover("#chat-list li")
    page.locator("li .delete").click()
    page.locator("li .delete").click()
    assert visit.number_of(".open-chat, .turn") == 0
    assert page.is_visible("#welcome")
    assert page.evaluate("localStorage.getItem('infinilm.chats')") == "[]"


def test_what_the_store_holds_of_others_is_ignored(visit: Visit) -> None:
    page = visit.page
    for content in ("{", "7", '{"a": 1}', '[{"id": 3}, null]', '[{"id": "x", "turns": [{"role": "system"}]}]'):
        page.evaluate("(content) => localStorage.setItem('infinilm.chats', content)", content)
        page.reload()
        visit.wait("document.querySelector('#status').textContent === 'ready'")
        assert visit.number_of(".open-chat") == 0


def test_an_answer_that_a_reload_interrupts_is_kept(visit: Visit, server: Server) -> None:
    page = visit.page
    visit.forced = {"ignore_eos": True, "max_tokens": 8000}
    visit.send("Go on")
    visit.wait("document.querySelectorAll('.token').length > 5")
    page.reload()
    page.wait_for_selector(".answer")
    assert len(visit.text_of_answer()) >= 5
    assert page.inner_text(".note") == "interrupted"
    wait_until(server.is_empty, 5)


def test_a_question_can_be_edited_and_an_example_starts_at_once(visit: Visit) -> None:
    page = visit.page
    visit.answer = "one"
    page.locator(".idea").nth(1).click()
    visit.wait_for_end()
    assert page.inner_text(".question") == "Write a haiku about the sea."
    assert page.input_value("#input") == ""
    visit.send("And then?")
    visit.wait_for_end()
    assert visit.number_of(".turn") == 4
    page.locator(".turn.user").first.hover()
    page.locator(".edit").first.click()
    page.keyboard.press("Escape")
    assert visit.number_of(".editor") == 0
    page.locator(".edit").first.click()
    page.fill(".editor textarea", "Another one")
    visit.answer = "changed"
    page.press(".editor textarea", "Enter")
    visit.wait("document.querySelector('.answer')?.textContent === 'changed'")
    visit.wait_for_end()
    assert visit.bodies[-1]["messages"] == [{"role": "user", "content": "Another one"}]
    assert visit.number_of(".turn") == 2
    assert page.locator(".open-chat").all_inner_texts() == ["Another one"]


def test_counters_settle_after_stop(visit: Visit, server: Server) -> None:
    page = visit.page
    visit.forced = {"ignore_eos": True, "max_tokens": 8000}
    visit.send("Go on")
    visit.wait("document.querySelectorAll('.token').length > 20")
    page.click("#stop")
    visit.wait_for_end()
    note = page.inner_text(".note")
    num_tokens = page.eval_on_selector(".answer", "answer => answer.textContent.length")
    assert re.fullmatch(r"[\d,]+ tokens( · [\d.]+/s)? · stopped", note)
    assert int(note.split()[0].replace(",", "")) >= num_tokens / 8
    visit.wait("document.querySelector('#running').textContent === '0'")
    visit.wait("document.querySelector('#memory').textContent === '0 %'")
    visit.wait("document.querySelector('#rate').textContent === '0.0'")
    assert page.inner_text(".note") == note


def test_tokens_by_keyboard_and_touch(visit: Visit) -> None:
    page = visit.page
    visit.forced = {"guided_choice": ["ab"]}
    visit.send("Hello")
    visit.wait_for_end()
    page.focus(".answer")
    chosen = page.locator("#popover .chosen code")
    for key, expected in (("ArrowRight", "a"), ("ArrowRight", "b"), ("Home", "a"), ("End", "b"), ("ArrowLeft", "a")):
        page.keyboard.press(key)
        visit.wait(f"document.querySelector('#popover .chosen code')?.textContent === '{expected}'")
        assert chosen.inner_text() == expected
    page.keyboard.press("Escape")
    assert page.is_hidden("#popover")
    page.locator(".token").nth(1).dispatch_event("click")
    assert chosen.inner_text() == "b"


def test_stop_several_turns_and_a_new_chat(visit: Visit, server: Server) -> None:
    page = visit.page
    page.fill("#max_tokens", "8000")
    page.fill("#system", "Be brief.")
    visit.forced = {"ignore_eos": True}
    visit.send("One")
    counts: list[int] = []
    for _ in range(3):
        visit.wait(f"document.querySelectorAll('.token').length > {counts[-1] if counts else 0}")
        counts.append(visit.number_of(".token"))
    assert counts == sorted(set(counts))
    visit.wait("document.querySelector('#running').textContent === '1'")
    visit.wait("parseFloat(document.querySelector('#rate').textContent) > 0")
    visit.wait("/^(< 1|[1-9]\\d*) %$/.test(document.querySelector('#memory').textContent)")
    page.click("#stop")
    visit.wait_for_end()
    wait_until(server.is_empty, 3)
    assert page.inner_text(".note").endswith("stopped")
    first = visit.text_of_answer()
    visit.send("Two")
    visit.wait("document.querySelectorAll('.answer')[1]?.textContent.length > 10")
    page.keyboard.press("Escape")
    visit.wait_for_end()
    wait_until(server.is_empty, 3)
    turns = [("system", "Be brief."), ("user", "One"), ("assistant", first), ("user", "Two")]
    assert visit.bodies[-1]["messages"] == [{"role": role, "content": content} for role, content in turns]
    visit.forced = {"guided_choice": ["again"]}
    page.locator(".regenerate >> visible=true").click()
    visit.wait("document.querySelectorAll('.answer')[1]?.textContent === 'again'")
    assert visit.bodies[-1]["messages"] == visit.bodies[-2]["messages"]
    visit.wait("document.querySelector('#running').textContent === '0'")
    page.click("#new-chat")
    assert visit.number_of(".turn") == 0
    assert page.is_visible("#welcome")


def test_controls_are_sent_and_remembered(visit: Visit) -> None:
    page = visit.page
    given = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.05, "top_k": 20, "max_tokens": 3, "seed": 11}
    for name, value in given.items():
        page.fill(f"#{name}", str(value))
    page.fill("#stop_strings", "END\n\\n\\n")
    page.fill("#top_logprobs", "")
    page.fill("#input", "two")
    page.press("#input", "Shift+Enter")
    page.type("#input", "lines")
    page.press("#input", "Enter")
    visit.wait_for_end()
    (body,) = visit.bodies
    assert body == {
        **given,
        "stop": ["END", "\n\n"],
        "messages": [{"role": "user", "content": "two\nlines"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page.reload()
    assert page.input_value("#temperature") == "0.5"
    assert page.input_value("input[data-for=temperature]") == "0.5"
    page.click("#reset")
    assert page.input_value("#temperature") == ""
    assert page.input_value("#stop_strings") == ""


def test_the_model_decides_what_is_left_empty(visit: Visit) -> None:
    page = visit.page
    defaults = {"temperature": 0.2, "top_p": 0.75, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.1}
    models = {"object": "list", "data": [{"id": "tiny-model", "default_sampling_params": defaults}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.reload()
    visit.wait("document.querySelector('#temperature').placeholder === '0.2'")
    assert page.input_value("input[data-for=top_p]") == "0.75"
    assert page.get_attribute("#top_k", "placeholder") == "all"
    visit.answer = "one"
    visit.send("Hello")
    visit.wait_for_end()
    assert not {"temperature", "top_p", "top_k", "min_p"} & set(visit.bodies[-1])


def test_a_refusal_is_told_where_it_belongs(visit: Visit) -> None:
    page = visit.page
    visit.accepted_status = 400
    page.fill("#temperature", "1000")
    visit.send("Hello")
    page.wait_for_selector(".failed")
    assert "temperature" in page.inner_text(".failed")
    assert page.inner_text(".failed") == page.inner_text(".field .wrong")
    assert page.get_attribute("#temperature", "aria-invalid") == "true"
    assert page.input_value("#input") == "Hello"
    assert visit.number_of(".turn") == 0
    page.fill("#temperature", "1")
    page.fill("#max_tokens", "3")
    page.press("#input", "Enter")
    page.wait_for_selector(".turn:not(.coming) .answer")
    assert visit.number_of(".failed, #fields .wrong") == 0


SAMPLE = """async (milliseconds) => {
  const composer = document.querySelector("#composer");
  const log = document.querySelector("#log");
  const seen = { widths: new Set(), places: new Set(), gaps: new Set(), tokens: new Set() };
  const start = performance.now();
  while (performance.now() - start < milliseconds) {
    await new Promise(requestAnimationFrame);
    const { x, y, width, height } = composer.getBoundingClientRect();
    seen.widths.add(document.documentElement.scrollWidth - innerWidth).add(log.scrollWidth - log.clientWidth);
    seen.places.add([x, y, width, height].join());
    seen.gaps.add(Math.round(log.scrollHeight - log.scrollTop - log.clientHeight));
    seen.tokens.add(document.querySelectorAll(".token").length);
  }
  return Object.fromEntries(Object.entries(seen).map(([name, values]) => [name, [...values]]));
}"""

SIZES = [
    {"viewport": DESKTOP, "color_scheme": "light"},
    {"viewport": PHONE, "color_scheme": "dark", "has_touch": True},
]


@pytest.mark.parametrize("visit", SIZES, indirect=True, ids=["desktop", "phone"])
def test_nothing_overflows_or_jumps_while_streaming(visit: Visit) -> None:
    page = visit.page
    visit.forced = {"ignore_eos": True, "max_tokens": 8000}
    visit.send("x" * 300 + "\n1" * 70)  # a long word, and more than fits the window
    visit.wait("document.querySelectorAll('.token').length > 5")
    seen = page.evaluate(SAMPLE, 700)
    assert len(seen["tokens"]) > 5
    assert max(seen["widths"]) <= 0
    assert len(seen["places"]) == 1
    assert max(seen["gaps"]) <= 2
    page.evaluate("document.querySelector('#log').scrollTop = 20")
    page.evaluate(SAMPLE, 200)
    assert page.evaluate("document.querySelector('#log').scrollTop") == 20
    page.keyboard.press("Escape")
    visit.wait_for_end()
    if page.is_visible("#open-settings"):
        page.click("#open-settings")
        page.wait_for_selector("#temperature", state="visible")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.keyboard.press("Escape")
        page.wait_for_selector("#temperature", state="hidden")


SCREENSHOTS = os.environ.get("SCREENSHOTS")
"""The directory that screenshots are written to; `make screenshots` sets it."""
PICTURES: dict[str, dict[str, Any]] = {
    "page": {"viewport": DESKTOP, "color_scheme": "light"},
    "page-dark": {"viewport": DESKTOP, "color_scheme": "dark"},
    "page-phone": {"viewport": PHONE, "color_scheme": "light", "has_touch": True},
}


@pytest.mark.skipif(SCREENSHOTS is None, reason="make screenshots runs it")
def test_screenshots(browser: "Browser", smollm2: Path) -> None:
    """Pictures of the page with real answers of the embedded model."""
    with serving(Path(DEFAULT_MODEL), OMP_NUM_THREADS="2") as server:
        for name, options in PICTURES.items():
            page = browser.new_page(**options)
            visit = Visit(page, server.url, temperature=0, max_tokens=300)
            for index in (0, 2):
                page.wait_for_selector("#welcome", state="visible")
                page.locator(".idea").nth(index).click()
                page.wait_for_selector("#send", state="visible", timeout=60_000)
                if index == 0:
                    page.click("#new-chat")
            visit.wait("document.querySelector('#running').textContent === '0'")
            page.evaluate("document.querySelector('#log').scrollTop = 0")
            if name == "page-dark":
                page.check("#tint")
            if name == "page":
                page.locator(".answer .token").nth(5).hover()
            else:
                page.mouse.move(0, 0)
            page.screenshot(path=Path(str(SCREENSHOTS)) / f"{name}.png")
            visit.check()
            page.close()


@pytest.fixture(scope="module")
def locked_server(long_dir: Path) -> Iterator[Server]:
    with serving(long_dir, key=KEY) as running:
        yield running


def test_a_key_is_asked_for_and_trouble_is_told(browser: "Browser", locked_server: Server) -> None:
    assert httpx.get(locked_server.url).status_code == 200
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    visit = Visit(page, locked_server.url, ignore_eos=True, max_tokens=8000)
    visit.accepted_status = 401
    page.wait_for_selector("#key-form", state="visible")
    assert page.inner_text("#status") == "needs a key"
    visit.send("Hello")
    visit.wait("document.querySelector('#input').value === 'Hello'")
    for key, state in (("another-key", "needs a key"), (KEY, "ready")):
        page.fill("#key", key)
        page.press("#key", "Enter")
        visit.wait(f"document.querySelector('#status').textContent === '{state}'")
    assert page.is_hidden("#key-form")
    assert page.evaluate("sessionStorage.getItem('infinilm.key')") == KEY
    assert KEY not in page.evaluate("JSON.stringify(localStorage)")

    visit.accepted_status = 503
    page.press("#input", "Enter")
    visit.wait("document.querySelectorAll('.token').length > 5")
    os.kill(locked_server.engine_pid, signal.SIGKILL)
    page.wait_for_selector(".note.wrong")
    assert "SIGKILL" in page.inner_text(".note.wrong")
    visit.wait("document.querySelector('#status').textContent === 'restarting'")
    assert "SIGKILL" in page.inner_text("#notice")
    assert page.inner_text("#running") == "–"
    visit.wait("document.querySelector('#status').textContent === 'ready'", 30)
    assert page.is_hidden("#notice")
    visit.check()
    page.close()
