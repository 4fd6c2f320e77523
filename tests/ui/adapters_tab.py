"""The page's tab of adapters: its table, and the form that loads them."""

from __future__ import annotations

from playwright.sync_api import Locator, Page


def row(page: Page, name: str) -> Locator:
    """What the table says of an adapter."""
    return page.locator(f'#adapters-table tr[data-adapter="{name}"]')


def fill(page: Page, name: str, folder: str) -> None:
    """Fills the form in."""
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Folder", exact=True).fill(folder)
    page.get_by_label("Folder", exact=True).press("Enter")
