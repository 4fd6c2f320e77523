"""A slow link, under control: what the page's server answers reaches the page when the test lets
it, and in the order it wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Page

# Of events that need no queue. Each is sent, and answered, at once.
_HOLD = """() => {
  const real = window.fetch;
  window.held = [];
  window.fetch = async (...asked) => {
    const answer = await real(...asked);
    if (window.held && String(asked[0]?.url ?? asked[0]).includes("/gradio_api/run/"))
      await new Promise((resolve) => window.held.push(resolve));
    return answer;
  };
  window.holdNoMore = () => {
    window.fetch = real;
    window.held.forEach((resolve) => resolve());
    window.held = null;
  };
}"""
# One after the other, each with the time to be taken in.
_LET_GO = """async (lastFirst) => {
  const held = window.held.splice(0);
  for (const resolve of lastFirst ? held.reverse() : held) {
    resolve();
    await new Promise((done) => setTimeout(done, 100));
  }
}"""


class LateAnswers:
    """Answers to the page's events, which are held."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def wait_for(self, count: int) -> None:
        """Until so many are held."""
        self._page.wait_for_function("count => window.held.length >= count", arg=count)

    def let_go(self, *, last_first: bool = False) -> None:
        """Gives the page what is held."""
        self._page.evaluate(_LET_GO, last_first)


@contextmanager
def late_answers(page: Page) -> Iterator[LateAnswers]:
    """Holds all answers until they are let go; at the end nothing is held any more."""
    page.evaluate(_HOLD)
    try:
        yield LateAnswers(page)
    finally:
        page.evaluate("window.holdNoMore()")
