"""The page in Chromium, over real servers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.chat.samples import TOOLS
from tests.page.browser import Browser
from tests.page.canned import Canned, canned_server
from tests.server.servers import PacedExecutor, RunningServer, fake_server
from tests.server.test_keys import secret, with_scopes
from tests.server.test_models import NAMES, loaded_names, serving_all, three_models
from tests.server.test_tools import CALL, HERMES, scripted_server

from quire.server.keys import KeyRing, KeyScope

ENTER, ESCAPE, TAB, ALT = "\ue007", "\ue00c", "\ue004", "\ue00a"
UP, DOWN, SPACE = "\ue013", "\ue015", "\ue00d"
STREAMING = '.message.assistant[data-state="streaming"]'
DONE = '.message.assistant[data-state="done"]'


@pytest.fixture
def server(text_model: Path) -> Iterator[RunningServer]:
    """A step takes 50 ms, so that answers of 512 tokens at most are seen to come."""
    executor = PacedExecutor(0.05, num_blocks=1024)
    with fake_server(text_model, executor) as running:
        yield running


@pytest.fixture
def canned() -> Iterator[Canned]:
    with canned_server() as running:
        yield running


def ask(browser: Browser, text: str) -> None:
    browser.wait_for("#message")
    browser.type(text + ENTER, "#message")
    browser.wait_for(".message.assistant")


def answer(browser: Browser) -> str:
    return browser.text(".message.assistant:last-child > .text")


def press(browser: Browser, name: str) -> None:
    """A button of a message."""
    [button] = [one for one in browser.all(".actions button") if one.text == name]
    button.click()


def differing(browser: Browser, look: Callable[[], str], count: int) -> set[str]:
    """So many different things that are seen one after another."""
    seen: set[str] = set()

    def has_enough() -> bool:
        seen.add(look())
        return len(seen) >= count

    browser.wait(has_enough)
    return seen


# ---- chat


def test_a_chat_streams(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait(lambda: browser.text("#model") == "tiny-text")
    ask(browser, "Hello there")
    seen = differing(browser, lambda: answer(browser), 5)
    assert browser.all(STREAMING)
    longest = max(seen, key=len)
    assert all(longest.startswith(text) for text in seen), "text only comes on"
    server.executor.step_s = 0.0
    browser.wait_for(DONE)
    assert answer(browser).startswith(longest)
    assert " tokens · " in browser.text(".message.assistant .note")
    assert browser.text("#announce") == "Answer complete"


def test_two_conversations_are_answered_at_once(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    ask(browser, "the first")
    browser.keys(ALT, "n")
    browser.wait(lambda: not browser.all(".message"))
    ask(browser, "the second")
    server.wait_until(lambda: server.engine.snapshot().num_running == 2)
    assert len(browser.all("#conversations .busy")) == 2
    browser.keys(ALT, DOWN)
    browser.wait(lambda: browser.text(".message.user .text") == "the first")
    before = answer(browser)
    browser.wait(lambda: len(answer(browser)) > len(before))
    server.executor.step_s = 0.0
    browser.wait(lambda: not browser.all("#conversations .busy"))
    assert browser.all(DONE)
    browser.keys(ALT, UP)
    browser.wait_for(DONE)
    assert browser.text(".message.user .text") == "the second"


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_answer_and_frees_its_blocks(
    server: RunningServer, browser: Browser, how: str
) -> None:
    browser.open(server.url)
    ask(browser, "go on for ever")
    browser.wait(lambda: answer(browser))
    if how == "button":
        browser.click("#stop")
    else:
        browser.keys(ESCAPE)
    browser.wait_for('.message.assistant[data-state="stopped"]')
    server.wait_until_idle()
    assert answer(browser), "what came stays"
    assert browser.find("#send").is_displayed()


def test_a_message_can_be_edited_and_an_answer_asked_for_again(
    server: RunningServer, browser: Browser
) -> None:
    server.executor.step_s = 0.0
    browser.open(server.url)
    browser.click("#parameters summary")
    browser.type("8", "[name=max_tokens]")
    browser.type("7", "[name=seed]")
    ask(browser, "one")
    browser.wait_for(DONE)
    first = answer(browser)
    press(browser, "Edit")
    browser.type(" and two", ".edit")
    browser.type(ENTER, ".edit")
    browser.wait_for(DONE)
    assert [m.text.splitlines()[0] for m in browser.all(".message.user")] == ["one and two"]
    assert len(browser.all(".message")) == 2
    second = answer(browser)
    assert second != first
    press(browser, "Retry")
    browser.wait_for(DONE)
    assert answer(browser) == second, "with a seed it is the same again"
    assert len(browser.all(".message")) == 2
    assert "8 tokens" in browser.text(".message.assistant .note")


def test_conversations_outlive_the_page_until_they_are_cleared(
    server: RunningServer, browser: Browser
) -> None:
    server.executor.step_s = 0.0
    browser.open(server.url)
    ask(browser, "remember me")
    browser.wait_for(DONE)
    browser.driver.refresh()
    browser.wait_for(DONE)
    assert browser.text(".message.user .text") == "remember me"
    browser.click("#clear")
    browser.driver.switch_to.alert.accept()
    browser.wait(lambda: not browser.all(".message"))
    assert "remember" not in str(browser.run("return JSON.stringify(localStorage)"))


def test_what_is_kept_is_bounded(server: RunningServer, browser: Browser) -> None:
    server.executor.step_s = 0.0
    browser.open(server.url)
    browser.run(
        "const one = n => ({id: String(n), parameters: {}, messages: [{role: 'user',"
        " content: n + ' ' + 'x'.repeat(n ? 100 : 1_900_000)}]});"
        "const all = [...Array(70).keys()].map(one);"
        "localStorage.setItem('quire.conversations', JSON.stringify(all))"
    )
    browser.driver.refresh()
    browser.wait(lambda: len(browser.all("#conversations li")) == 70)
    browser.keys(ALT, "n")
    ask(browser, "the newest")
    browser.wait_for(DONE)
    kept = "return JSON.parse(localStorage.getItem('quire.conversations'))"
    assert len(browser.run(kept)) == 50
    assert browser.run(kept)[0]["messages"][0]["content"] == "the newest"


def test_without_storage_it_works_all_the_same(server: RunningServer, browser: Browser) -> None:
    server.executor.step_s = 0.0
    forbid = "Object.defineProperty(window, arguments0, {get() { throw new DOMException('no') }})"
    for name in ("localStorage", "sessionStorage"):
        browser.before_load(forbid.replace("arguments0", repr(name)))
    browser.open(server.url)
    ask(browser, "Hello")
    browser.wait_for(DONE)


def test_an_answer_can_be_copied(canned: Canned, browser: Browser) -> None:
    browser.expected = ("/v1/stats",)
    canned.deltas = [{"content": "a text to copy"}]
    browser.before_load(
        "const board = navigator.clipboard;"
        "if (board) board.writeText = async text => { window.copied = text };"
    )
    browser.open(canned.url)
    ask(browser, "what?")
    browser.wait_for(DONE)
    press(browser, "Copy")
    browser.wait(lambda: browser.run("return window.copied ?? null") == "a text to copy")


def test_what_the_server_refuses_is_said(server: RunningServer, browser: Browser) -> None:
    browser.expected = ("400 (Bad Request)",)
    browser.open(server.url)
    browser.click("#parameters summary")
    browser.type("-5", "[name=temperature]")
    ask(browser, "too cold")
    browser.wait_for(".message .error")
    assert "temperature" in browser.text(".message .error")
    browser.type('{"top_k": ', "[name=more]")
    press(browser, "Retry")
    browser.wait(lambda: "More fields" in browser.text(".message .error"))


# ---- reasoning, tools, and text that means harm

CALLS = (
    {"reasoning_content": "They ask for "},
    {"reasoning_content": "the weather."},
    {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Bern"}'}}]},
    {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "time", "arguments": "{}"}}]},
)


def test_reasoning_is_folded_and_tools_are_shown(canned: Canned, browser: Browser) -> None:
    browser.expected = ("/v1/stats",)
    canned.deltas = CALLS
    browser.open(canned.url)
    ask(browser, "How is the weather?")
    browser.wait_for(DONE)
    assert browser.text(".reasoning .text") == "They ask for the weather."
    assert not browser.find(".reasoning .text").is_displayed()
    browser.click(".reasoning summary")
    assert browser.find(".reasoning .text").is_displayed()
    assert [call.text for call in browser.all(".call-name code")] == ["weather", "time"]
    assert browser.all(".call pre")[0].text == '{\n  "city": "Bern"\n}'
    press(browser, "Give results")
    for box, result in zip(browser.all(".results textarea"), ("sunny", "noon"), strict=True):
        box.send_keys(result)
    canned.deltas = ({"content": "It is sunny at noon."},)
    browser.click(".results button")
    browser.wait(lambda: "sunny at noon" in answer(browser))
    sent = canned.asked[1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "Bern"}',
    }
    assert sent[1]["content"] is None
    assert (sent[2]["tool_call_id"], sent[2]["content"]) == ("c1", "sunny")


def test_a_servers_own_reasoning_and_calls_are_shown(browser: Browser, tmp_path: Path) -> None:
    scripted = contextmanager(scripted_server)
    with scripted(tmp_path, HERMES) as model:
        browser.open(model.server.url)
        browser.click("#parameters summary")
        browser.type(json.dumps(TOOLS), "[name=tools]")
        model.says(f"<think>Let me see.</think>I look.\n{CALL}")
        ask(browser, "How is it in Paris?")
        browser.wait_for(DONE)
        assert browser.text(".reasoning .text") == "Let me see."
        assert answer(browser) == "I look."
        assert browser.text(".call-name code") == "weather"
        assert json.loads(browser.text(".call pre")) == {"city": "Paris", "days": 3}
        press(browser, "Give results")
        browser.type("rain", ".results textarea")
        model.says("It rains.")
        browser.click(".results button")
        browser.wait(lambda: answer(browser) == "It rains.")
        browser.wait(lambda: len(browser.all(DONE)) == 2)
        browser.leave()


HARM = """<script>window.harmed = 1</script><img src=x onerror="window.harmed = 2">

[click](javascript:window.harmed=3) ![pixel](https://evil.example/pixel.png) <https://a.example>

```html
<iframe src="https://evil.example"></iframe><b onclick="window.harmed=4">
```

| a | b |
|---|---|
| <svg onload="window.harmed=5"> | [x](data:text/html,<script>window.harmed=6</script>) |

# <style>body{display:none}</style>
"""


def test_a_models_text_stays_text(canned: Canned, browser: Browser) -> None:
    browser.expected = ("/v1/stats",)
    canned.deltas = [{"content": HARM[n : n + 7]} for n in range(0, len(HARM), 7)]
    canned.deltas += [{"reasoning_content": "<img src=x onerror='window.harmed = 7'>"}]
    browser.open(canned.url)
    ask(browser, "<img src=x onerror='window.harmed = 8'>")
    browser.wait_for(DONE)
    assert browser.run("return window.harmed ?? null") is None
    for name in ("script", "img", "iframe", "svg", "style", "b"):
        assert browser.all(f"#messages {name}") == [], name
    links = [link.get_attribute("href") for link in browser.all("#messages a")]
    assert links == ["https://evil.example/pixel.png", "https://a.example/"]
    assert "window.harmed = 1" in answer(browser), "it can be read"


def test_a_page_could_not_be_made_of_text_by_mistake(canned: Canned, browser: Browser) -> None:
    browser.expected = ("/v1/stats", "TrustedHTML", "Content Security Policy")
    browser.open(canned.url)
    script = "try { document.body.innerHTML = '<b>x'; return 'made' } catch (e) { return e.name }"
    assert browser.run(script) == "TypeError"


MARKDOWN = """# Title
Some **bold**, *slanted* and `code` words, [a link](https://a.example/x).

1. one
2. two
   - inner

> quoted

```python
def add(a, b):
    return a + b
```
"""


def test_markdown_is_drawn(canned: Canned, browser: Browser) -> None:
    browser.expected = ("/v1/stats",)
    canned.deltas = [{"content": MARKDOWN}]
    browser.open(canned.url)
    ask(browser, "draw")
    browser.wait_for(DONE)
    found: Any = lambda selector: browser.find(f"#messages .text {selector}").text  # noqa: E731
    assert (found("h3"), found("strong"), found("em")) == ("Title", "bold", "slanted")
    assert found("p code") == "code"
    assert found("pre") == "def add(a, b):\n    return a + b"
    assert found("ol li ul li") == "inner"
    assert found("blockquote") == "quoted"


# ---- the engine


def pixels(browser: Browser, canvas: str) -> str:
    return str(browser.run("return document.querySelector(arguments[0]).toDataURL()", canvas))


def test_the_engine_view_moves_under_load(server: RunningServer, browser: Browser) -> None:
    server.executor.step_s = 0.15
    browser.open(server.url)
    browser.wait(lambda: browser.text("#running") == "0")
    assert browser.text("#waiting") == "nothing waits"
    idle = pixels(browser, "#kv")
    ask(browser, "a prompt of some length, so that it is a chunk")
    browser.keys(ALT, "n")
    ask(browser, "and another one")
    browser.wait(lambda: browser.text("#running") == "2")
    browser.wait(lambda: float(browser.text("#rate").replace(",", "")) > 0)
    browser.wait(lambda: " ms" in browser.text("#step"))
    assert pixels(browser, "#kv") != idle
    differing(browser, lambda: pixels(browser, "#lanes"), 4)
    browser.wait(lambda: "2 sequences run" in browser.find("#lanes").get_attribute("aria-label"))
    browser.click("#lanes-text summary")
    browser.wait(lambda: browser.text("#lane-rows").count("decode") == 2)
    server.executor.step_s = 0.0
    browser.wait(lambda: browser.text("#running") == "0")


def test_what_waits_is_shown_by_its_reason(browser: Browser, text_model: Path) -> None:
    executor = PacedExecutor(0.05, num_blocks=1024)
    with fake_server(text_model, executor, {"max_batch_size": 1}) as server:
        browser.open(server.url)
        ask(browser, "the one that runs")
        browser.keys(ALT, "n")
        ask(browser, "the one that waits")
        browser.wait(lambda: "1 " in browser.text("#waiting"))
        assert "wait" in browser.text("#running-note")
        executor.step_s = 0.0
        browser.wait(lambda: browser.text("#waiting") == "nothing waits")
        browser.leave()


# ---- the key


@pytest.fixture
def locked(text_model: Path) -> Iterator[RunningServer]:
    ring = KeyRing([with_scopes("alice", KeyScope.INFERENCE)])
    with fake_server(text_model, keys=ring) as running:
        yield running


def test_a_wrong_key_is_explained_and_a_right_one_kept_only_if_asked(
    locked: RunningServer, browser: Browser
) -> None:
    browser.expected = ("401 (Unauthorized)",)
    browser.open(locked.url)
    browser.wait_for("#key-dialog[open]")
    assert "have a key" in browser.text("#key-text")
    assert browser.text("#model") == ""
    browser.type("not-the-key-at-all" + ENTER, "#key")
    browser.wait(lambda: "did not accept this key" in browser.text("#key-text"))
    assert "a valid API key is needed" in browser.text("#key-text")
    browser.type(secret("alice") + ENTER, "#key")
    browser.wait(lambda: browser.text("#model") == "tiny-text")
    assert not browser.all("#key-dialog[open]")
    stored = "return JSON.stringify([localStorage, sessionStorage])"
    assert secret("alice") not in browser.run(stored)
    ask(browser, "Hello")
    browser.wait_for(DONE)
    browser.wait(lambda: "your own" in browser.text("#running-note"))
    assert not browser.find("#kv-section").is_displayed(), "totals are for the scope stats"
    browser.click("#key-button")
    assert "another key" in browser.text("#key-text")
    browser.click("#keep-key")
    browser.type(secret("alice") + ENTER, "#key")
    browser.wait(lambda: not browser.all("#key-dialog[open]"))
    assert secret("alice") in browser.run("return JSON.stringify(sessionStorage)")
    assert secret("alice") not in browser.run("return JSON.stringify(localStorage)")
    browser.driver.refresh()
    browser.wait(lambda: browser.text("#model") == "tiny-text")
    assert not browser.all("#key-dialog[open]")


# ---- keyboard, screen readers, phones, themes


def test_the_keyboard_is_enough(server: RunningServer, browser: Browser) -> None:
    server.executor.step_s = 0.0
    browser.open(server.url)
    browser.wait(lambda: browser.text("#model") == "tiny-text")
    reached = set()
    for _ in range(24):
        browser.keys(TAB)
        reached.add(
            browser.run("return document.activeElement.id || document.activeElement.tagName")
        )
    assert {"theme", "new", "clear", "messages", "message", "send"} <= reached
    browser.run("document.getElementById('new').focus()")
    browser.keys(ENTER)
    browser.type("by keys alone" + ENTER)
    browser.wait_for(DONE)
    browser.run("document.querySelector('.message.assistant .actions button').focus()")
    browser.keys(SPACE)
    browser.wait_for(DONE)
    assert len(browser.all(".message")) == 2


def test_everything_has_a_name_for_screen_readers(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait(lambda: browser.text("#model") == "tiny-text")
    tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = ("button", "textbox", "link", "image", "img", "spinbutton", "checkbox", "navigation")
    parts = [node for node in tree if node.get("role", {}).get("value") in named]
    assert len(parts) > 10
    for node in parts:
        if not node.get("ignored"):
            assert node.get("name", {}).get("value"), node
    assert browser.run("return document.documentElement.lang") == "en"


@pytest.mark.parametrize("width", [1100, 1280, 1400])
def test_figures_fit_their_tiles(server: RunningServer, browser: Browser, width: int) -> None:
    browser.size(width, 800)
    browser.open(server.url)
    room = """
        const figure = document.getElementById("step");
        figure.textContent = "88.8 ms";
        const range = document.createRange();
        range.selectNodeContents(figure);
        return figure.getBoundingClientRect().right - range.getBoundingClientRect().right;
    """
    assert browser.run(room) > 6, "beside the padding"


def test_times_under_the_lanes_do_not_touch_on_a_phone(
    server: RunningServer, browser: Browser
) -> None:
    browser.before_load("""
        const paint = CanvasRenderingContext2D.prototype.fillText;
        window.times = {};
        CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
            const { width } = this.measureText(text);
            const left = x - { center: width / 2, right: width, left: 0 }[this.textAlign];
            if (/now|ago/.test(text)) window.times[text] = [left, left + width];
            paint.call(this, text, x, y);
        };
    """)
    browser.size(360, 700, is_phone=True)
    browser.open(server.url)
    browser.click("#tab-engine")
    browser.wait(lambda: browser.run("return 'now' in window.times"))
    times = sorted(browser.run("return Object.values(window.times)"))
    assert len(times) > 1
    assert all(left - right >= 8 for (_, right), (left, _) in pairwise(times))


def test_it_fits_a_phone(server: RunningServer, browser: Browser) -> None:
    browser.size(360, 700, is_phone=True)
    browser.open(server.url)
    ask(browser, "a word " * 40)
    wide = "return document.documentElement.scrollWidth"
    assert browser.run(wide) <= 360
    assert not browser.find("#engine").is_displayed()
    browser.click("#tab-engine")
    browser.wait(lambda: browser.text("#running") == "1")
    assert browser.find("#engine").is_displayed()
    assert not browser.find("#chat").is_displayed()
    assert browser.run(wide) <= 360
    browser.click("#menu")
    assert browser.find("#new").is_displayed()
    browser.click("#new")
    browser.click("#tab-chat")
    browser.wait(lambda: not browser.all(".message"))
    server.executor.step_s = 0.0


def test_it_is_light_or_dark(server: RunningServer, browser: Browser) -> None:
    colour = "return getComputedStyle(document.body).backgroundColor"
    browser.open(server.url)
    light = browser.run(colour)
    browser.media(scheme="dark")
    browser.wait(lambda: browser.run(colour) != light)
    dark = browser.run(colour)
    browser.click("#theme")
    browser.wait(lambda: browser.run(colour) == light)
    browser.click("#theme")
    browser.wait(lambda: browser.run(colour) == dark)


# ---- several models


def test_a_model_is_chosen_for_the_chat_and_the_engine(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with serving_all(three_models(tmp_path_factory.mktemp("models"))) as several:
        browser.open(several.url)
        browser.wait_for("#models")
        assert [option.text for option in browser.all("#models option")] == list(NAMES)
        browser.type("green", "#models")
        ask(browser, "Hello")
        browser.wait_for(DONE)
        assert loaded_names(several) == ["green"]
        browser.wait(lambda: browser.run("return document.title") == "quire · green")
        assert "NaN" not in browser.text("#engine")
        browser.driver.refresh()  # it is chosen still
        browser.wait(lambda: browser.run("return document.title") == "quire · green")
