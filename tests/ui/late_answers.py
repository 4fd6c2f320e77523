"""A slow link, under control: what the page's server answers reaches the page when the test lets
it, and in the order it wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from playwright.sync_api import Page

# Of events that need no queue: each is sent, and answered, at once.
_ANSWERS = "/gradio_api/run/"
# Of events that stream: they are not even sent.
_QUESTIONS = "/gradio_api/queue/join"
_HOLD = """([path, unsent]) => {
  const real = window.fetch;
  window.held = [];
  window.fetch = async (...asked) => {
    const held = window.held && String(asked[0]?.url ?? asked[0]).includes(path);
    const wait = () =>
      new Promise((resolve) => window.held ? window.held.push(resolve) : resolve());
    if (held && unsent) await wait();
    const answer = await real(...asked);
    if (held && !unsent) await wait();
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
    """Answers to the page's events, or the events themselves, which are held."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def wait_for(self, count: int) -> None:
        """Until so many are held."""
        self._page.wait_for_function("count => window.held.length >= count", arg=count)

    def let_go(self, *, last_first: bool = False) -> None:
        """Gives the page what is held."""
        self._page.evaluate(_LET_GO, last_first)


def late_answers(page: Page) -> AbstractContextManager[LateAnswers]:
    """Holds all answers until they are let go; at the end nothing is held any more."""
    return _held(page, _ANSWERS, unsent=False)


def late_questions(page: Page) -> AbstractContextManager[LateAnswers]:
    """Holds what is asked of a model, on its way to the page's server."""
    return _held(page, _QUESTIONS, unsent=True)


@contextmanager
def _held(page: Page, path: str, *, unsent: bool) -> Iterator[LateAnswers]:
    page.evaluate(_HOLD, [path, unsent])
    try:
        yield LateAnswers(page)
    finally:
        page.evaluate("window.holdNoMore()")
