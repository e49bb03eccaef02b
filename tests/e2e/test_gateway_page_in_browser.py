# SPDX-License-Identifier: Apache-2.0
"""The live page in headless Chromium, against gateway, real Triton server and bundled model."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import LivePage, chromium
from gateway_process import running_gateway
from playwright.sync_api import Browser, Route
from tandem_backend.serving.launcher import TritonServer

QUESTION = "What does json.dumps do?"
LONG_QUESTION = "Show how to use collections.Counter."
PHONE = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
CALM = {"reduced_motion": "reduce"}  # no replay by itself

Open = Callable[..., LivePage]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def url(browser: Browser, server: TritonServer) -> Iterator[str]:
    """The gateway's. The browser comes first: without one nothing else is started."""
    with running_gateway(server.grpc_url) as gateway:
        yield gateway.url


@pytest.fixture
def open_page(browser: Browser, url: str) -> Iterator[Open]:
    """Opens the page; at the end of the test nothing may have been complained about."""
    contexts, pages = [], []

    def open_(**options: Any) -> LivePage:
        contexts.append(browser.new_context(**{**CALM, **options}))
        pages.append(LivePage(contexts[-1], url))
        return pages[-1]

    yield open_
    complaints = [complaint for page in pages for complaint in page.complaints]
    for context in contexts:
        context.close()
    assert complaints == []


def without_an_end(route: Route) -> None:
    """Let the model write until max_tokens."""
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))


def test_it_streams_and_marks_every_token(open_page: Open) -> None:
    live = open_page()
    (text,) = live.ask(LONG_QUESTION)
    assert len(text) > 40
    tokens = live.page.locator(".text .token")
    assert "".join(tokens.all_text_contents()).strip() == text.strip()
    assert live.page.locator(".text .by-mtp, .text .by-lookup").count() > 0
    assert live.page.locator(".text .by-target").count() > 0
    figures = dict(
        zip(live.page.locator("dt").all_inner_texts(), live.page.locator("dd").all_inner_texts(), strict=True)
    )
    assert float(figures["acceptance length"]) > 1
    assert int(figures["tokens/s"].replace(",", "")) > 0
    assert int(figures["tokens"]) >= tokens.count()
    shares = re.findall(r"(\d+) %", live.page.locator(".shares").inner_text())
    assert 98 <= sum(map(int, shares)) <= 102
    live.screenshot("desktop-light")


def test_text_comes_piece_by_piece(open_page: Open) -> None:
    """What is shown is noted between events that come two frames apart, however fast the model was."""
    live = open_page()
    live.page.evaluate(
        """() => {
            const unhurried = window.fetch;
            window.shown = [];
            window.fetch = async (...request) => {
                const response = await unhurried(...request);
                if (!response.headers.get("content-type").startsWith("text/event-stream")) return response;
                const bytes = new Uint8Array(await response.arrayBuffer());
                const events = new TextDecoder().decode(bytes).split(/(?<=\\n\\n)/);
                return new Response(new ReadableStream({
                    async pull(controller) {
                        if (!events.length) return controller.close();
                        window.shown.push(document.querySelector(".text")?.textContent ?? "");
                        controller.enqueue(new TextEncoder().encode(events.shift()));
                        await new Promise((resume) => requestAnimationFrame(() => requestAnimationFrame(resume)));
                    },
                }), response);
            };
        }"""
    )
    (text,) = live.ask(LONG_QUESTION)
    seen = live.page.evaluate("window.shown")
    assert len(set(seen)) > 3
    assert all(text.startswith(part.strip()) for part in seen)


def test_the_switch_changes_no_character(open_page: Open) -> None:
    live = open_page()
    (on,) = live.ask(QUESTION)
    live.page.locator("#new-chat").click()
    live.page.get_by_label("Off", exact=True).check()
    (off,) = live.ask(QUESTION)
    assert off == on
    assert set(live.page.locator(".text .token").evaluate_all("all => all.map(one => one.className)")) == {
        "token by-target"
    }
    assert live.page.locator("dd").nth(1).inner_text() == "1.00"


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_side_by_side_the_texts_are_the_same(open_page: Open, temperature: str) -> None:
    live = open_page(viewport={"width": 1240, "height": 820})
    live.page.locator("#settings summary").click()
    live.page.locator("#temperature").fill(temperature)
    live.page.get_by_label("Side by side").check()
    on, off = live.ask(LONG_QUESTION, 2)
    assert on == off
    live.page.locator(".verdict").wait_for()
    assert "The same text, character for character." in live.page.locator(".verdict").inner_text()
    left, right = (live.page.locator(".answer").nth(n).bounding_box() for n in (0, 1))
    assert left is not None
    assert right is not None
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] < right["x"]
    replay = live.page.locator(".comparison button")
    replay.click()
    assert replay.inner_text() == "Show all"
    live.page.locator(".text .later").first.wait_for()
    replay.click()
    assert live.page.locator(".text .later").count() == 0
    live.screenshot(f"side-by-side-{temperature}")


def test_a_comparison_that_was_too_fast_to_see_is_played_again(open_page: Open) -> None:
    live = open_page(viewport={"width": 1240, "height": 820}, reduced_motion="no-preference")
    live.page.get_by_label("Side by side").check()
    on, off = live.ask(QUESTION, 2)
    live.page.locator(".clock.running").wait_for()
    assert re.fullmatch(r"\d+ ms, shown [\d.]+ times slower", live.page.locator(".clock").inner_text())
    live.page.locator(".answer:nth-child(2) .later").first.wait_for()
    live.screenshot("replay")
    live.page.locator(".comparison button").click()
    assert live.page.locator(".text .later").count() == 0
    assert [live.answers.nth(n).inner_text() for n in (0, 1)] == [on, off]


def test_a_key_is_asked_for_where_one_is_needed(open_page: Open) -> None:
    live = open_page()
    refused = json.dumps({"error": {"message": "a key is needed", "type": "authentication_error"}})
    live.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=401, body=refused))
    live.page.locator("#message").fill(QUESTION)
    live.page.locator("#message").press("Enter")
    live.page.locator(".note.error").wait_for()
    assert live.page.locator(".note.error").inner_text() == "a key is needed"
    assert live.page.evaluate("document.activeElement.id") == "api-key"
    live.page.unroute("**/v1/chat/completions")
    live.page.keyboard.type("tandem-key")
    with live.page.expect_request("**/v1/chat/completions") as sent:
        live.page.locator("#send").click()
    assert sent.value.headers["authorization"] == "Bearer tandem-key"
    live.answers.nth(1).wait_for()
    assert all("401" in complaint for complaint in live.complaints)  # the browser's own words
    live.complaints.clear()


def test_a_tokens_tree_shows_under_the_pointer_and_goes(open_page: Open) -> None:
    live = open_page(viewport={"width": 1240, "height": 820})
    drafted = live.page.locator(".text .by-mtp, .text .by-lookup")
    for _ in range(5):  # what is drafted depends on how costly that seems on a busy machine
        live.ask(LONG_QUESTION)
        if drafted.count() > 1:
            break
    drafted.nth(1).hover()
    tree = live.page.locator("#tree")
    tree.wait_for()
    assert re.search(r"proposed by (mtp|lookup), which gave it \d+ %. \d+ drafted, \d+ accepted", tree.inner_text())
    drawn = tree.locator("svg .node")
    assert drawn.count() >= 2
    assert tree.locator("svg .accepted.here").count() == 1
    words = tree.locator("svg").get_attribute("aria-label")
    assert words is not None
    assert "accepted" in words
    live.screenshot("tree-under-the-pointer")
    live.page.mouse.move(5, 5)
    tree.wait_for(state="hidden")


def test_everything_can_be_done_by_keyboard(open_page: Open) -> None:
    live = open_page()
    press = live.page.keyboard.press
    assert live.page.evaluate("document.activeElement.id") == "message"
    press("Shift+Tab")
    assert live.page.evaluate("document.activeElement.name") == "speculation"
    press("ArrowRight")
    press("ArrowRight")
    assert live.page.locator("input[value=both]").is_checked()
    press("Tab")
    live.page.keyboard.type(QUESTION)
    press("Shift+Enter")
    assert live.page.locator("#message").input_value() == QUESTION + "\n"
    press("Backspace")
    press("Enter")
    live.answers.nth(1).wait_for()
    live.page.locator(".verdict").wait_for()
    assert live.page.evaluate("document.activeElement.id") == "message"
    for _ in range(12):
        press("Shift+Tab")
        if live.page.evaluate("document.activeElement.className") == "text":
            break
    press("End")
    press("Home")
    press("ArrowRight")
    press("ArrowDown")
    tree = live.page.locator("#tree")
    tree.wait_for()
    assert live.page.evaluate("document.activeElement.classList.contains('current')")
    assert re.search("Round|pass over the prompt", live.page.locator("#status").inner_text())
    assert live.colour(".text .current", "outline-style") == "solid"
    press("Escape")
    tree.wait_for(state="hidden")
    assert live.answers.count() == 2


def test_the_conversation_goes_along(open_page: Open) -> None:
    live = open_page()
    (answer,) = live.ask(QUESTION)
    with live.page.expect_request("**/v1/chat/completions") as sent:
        live.ask("And loads?")
    asked = sent.value.post_data_json["messages"]
    assert [message["role"] for message in asked] == ["user", "assistant", "user"]
    assert asked[1]["content"].strip() == answer.strip()
    live.page.locator("#new-chat").click()
    with live.page.expect_request("**/v1/chat/completions") as sent:
        live.ask(QUESTION)
    assert len(sent.value.post_data_json["messages"]) == 1


def test_escape_stops_an_answer(open_page: Open) -> None:
    live = open_page()
    live.page.route("**/v1/chat/completions", without_an_end)
    live.page.locator("#settings summary").click()
    live.page.locator("#max-tokens").fill("3000")
    live.page.locator("#message").fill(QUESTION)
    live.page.locator("#message").press("Enter")
    live.page.locator(".answer.running .token").first.wait_for()
    live.page.keyboard.press("Escape")
    live.page.locator("#send").wait_for()
    assert live.page.locator(".note").inner_text() == "Stopped."
    live.page.unroute("**/v1/chat/completions")
    (text,) = live.ask(QUESTION)  # the conversation goes on
    assert text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(open_page: Open, scheme: str) -> None:
    live = open_page(**PHONE, color_scheme=scheme)
    assert live.page.evaluate("document.documentElement.scrollWidth") == PHONE["viewport"]["width"]
    for control in live.page.locator("button:visible, summary:visible, textarea:visible, .segments label").all():
        box = control.bounding_box()
        assert box is not None
        assert box["height"] >= 36, control.inner_text()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["viewport"]["width"]
    live.screenshot(f"phone-{scheme}-intro")
    live.page.get_by_label("Side by side").check()
    live.ask(QUESTION, 2)
    live.page.locator(".verdict").wait_for()
    assert live.page.evaluate("document.documentElement.scrollWidth") == PHONE["viewport"]["width"]
    upper, lower = (live.page.locator(".answer").nth(n).bounding_box() for n in (0, 1))
    assert upper is not None
    assert lower is not None
    assert upper["y"] + upper["height"] <= lower["y"]
    live.page.locator(".text .by-mtp, .text .by-lookup").first.tap()
    panel = live.page.locator("#tree").bounding_box()
    assert panel is not None
    assert panel["x"] == 0
    assert panel["y"] + panel["height"] == pytest.approx(
        PHONE["viewport"]["height"], abs=1
    )  # half a pixel of the screen
    live.screenshot(f"phone-{scheme}-tree")
    live.page.locator("#tree .close").tap()
    live.page.locator("#tree").wait_for(state="hidden")


def luminance(colour: str) -> float:
    """Relative luminance as in WCAG 2.2, of an opaque computed colour."""
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read_and_are_not_alone(open_page: Open, scheme: str) -> None:
    """Text 4.5 : 1, lines and edges 3 : 1 (WCAG 2.2, AA); each proposer has a line of its own kind."""
    live = open_page(color_scheme=scheme)
    paper = live.colour("body", "background-color")
    assert (luminance(paper) < 0.1) == (scheme == "dark")
    kinds = set()
    for name in ("lookup", "mtp", "draft_model", "forced"):
        token = f".legend .by-{name}"
        tint, ink = live.colour(token, "background-color"), live.colour(token, "color")
        line = live.colour(token, "text-decoration-color")
        assert contrast(ink, tint) >= 4.5, name
        assert contrast(line, tint) >= 3, name
        assert contrast(line, paper) >= 3, name
        kinds.add(live.colour(token, "text-decoration-style"))
    assert len(kinds) == 4
    assert contrast(live.colour("#intro p", "color"), paper) >= 4.5
    assert contrast(live.colour("#send", "color"), live.colour("#send", "background-color")) >= 4.5
    live.screenshot(f"intro-{scheme}")


def test_markup_stays_text(open_page: Open) -> None:
    live = open_page()
    markup = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    live.page.on("dialog", lambda dialog: live.complaints.append(dialog.message))
    live.ask(markup)
    assert live.page.locator(".question").inner_text() == markup
    assert live.page.locator("#conversation img, #conversation script").count() == 0


def test_an_error_is_told_and_the_question_stays(open_page: Open) -> None:
    live = open_page()
    live.page.route("**/v1/chat/completions", lambda route: route.abort())
    live.page.locator("#message").fill(QUESTION)
    live.page.locator("#message").press("Enter")
    live.page.locator(".note.error").wait_for()
    assert "can't be reached" in live.page.locator(".note.error").inner_text()
    assert live.page.locator("#message").input_value() == QUESTION
    assert all("ERR_FAILED" in complaint for complaint in live.complaints)  # the browser's own words
    live.complaints.clear()
