# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium for tests of the page: found on the machine, never downloaded."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Locator, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
ANSWER_TIMEOUT_MS = 60_000


def find_chromium() -> str:
    """Its path, or $TANDEM_CHROMIUM's. Skips the test where there is none."""
    found = os.environ.get("TANDEM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium, or name one in TANDEM_CHROMIUM")
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser for some tests. Skips them where Chromium doesn't start."""
    path = find_chromium()
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # root may not use it
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS, *sandbox])
        except Error as error:
            pytest.skip(f"{path} does not start: {str(error)[:300]}")
        yield browser
        browser.close()


class LivePage:
    """The page in a browser context of its own, and what it complained about."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.complaints: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(ANSWER_TIMEOUT_MS)
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)
        self.page.locator("#model option").first.wait_for(state="attached")

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    @property
    def answers(self) -> Locator:
        """The texts of the answers that have ended."""
        return self.page.locator(".text[aria-busy=false]")

    def ask(self, question: str, num_answers: int = 1) -> list[str]:
        """Send a question by keyboard; the texts of the answers that it got."""
        before = self.answers.count()
        self.page.locator("#message").fill(question)
        self.page.locator("#message").press("Enter")
        self.answers.nth(before + num_answers - 1).wait_for()
        self.page.locator("#send").wait_for()
        return [self.answers.nth(before + n).inner_text() for n in range(num_answers)]

    def colour(self, selector: str, name: str) -> str:
        """A computed style of the first element."""
        locator = self.page.locator(selector).first
        return str(locator.evaluate("(element, name) => getComputedStyle(element).getPropertyValue(name)", name))

    def screenshot(self, name: str) -> None:
        """Into $TANDEM_SCREENSHOTS, where it is set: to be looked at."""
        folder = os.environ.get("TANDEM_SCREENSHOTS")
        if folder is not None:
            self.page.screenshot(path=Path(folder) / f"{name}.png")
