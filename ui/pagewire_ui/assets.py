"""The page's own scripts, styles and chat templates, shipped beside this module."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import gradio as gr

FOLDER = Path(__file__).parent / "assets"
STYLE_SHEETS = sorted(FOLDER.glob("*.css"))


@cache
def url_path() -> str:
    """Where the scripts are served, relative to the page: new whenever one of them changes, so that
    a browser may keep them for ever."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.glob("*.js")):
        digest.update(path.name.encode() + b"\\0" + path.read_bytes())
    return f"pagewire-{digest.hexdigest()[:16]}"


def scripted(script: str, events: tuple[str, ...] = (), **arguments: Any) -> gr.HTML:
    """A component that one of the scripts draws: its `mount` gets the element, Gradio's `trigger`,
    `props` and `watch`.

    Args:
        script: its name, without folder.
        events: those that the script triggers and Python listens to.
        arguments: of gr.HTML.
    """
    # Gradio finds the names of a component's events in this text.
    names = ", ".join(f"'{name}'" for name in events)
    return gr.HTML(
        html_template="",
        js_on_load=f"""
        const events = [{names}];{_LOADED}
        load('{script}').then((script) => script.mount(element, {{ trigger, props, watch }}));
        """,
        apply_default_css=False,
        **arguments,
    )


def imported(expression: str, parameters: str, *scripts: str) -> str:
    """A JavaScript function for an event of Gradio's: it imports scripts, each by its own name, and
    gives the expression's value.

    Args:
        expression: may await.
        parameters: names of the function's parameters, the event's inputs.
        scripts: their names, without folder.
    """
    return f"""async ({parameters}) => {{
      {_LOADED}
      {"".join(f"const {name} = loaded.{name} ?? await load('{name}');" for name in scripts)}
      return {expression};
    }}"""


def preloaded() -> str:
    """A JavaScript function that imports all scripts. What is there already, an event need not wait
    for: it is answered before the person can do another thing."""
    names = [path.stem for path in sorted(FOLDER.glob("*.js"))]
    return f"""async () => {{
      {_LOADED}
      await Promise.all({names}.map(load));
    }}"""


# `loaded`, the scripts that are there by name, and `load`, which fetches one.
_LOADED = f"""
      const root = (window.gradio_config?.root ?? '').replace(/\\/$/, '');
      const loaded = (window.pagewire ??= {{}});
      const load = async (name) =>
        (loaded[name] = await import(`${{root}}/{url_path()}/${{name}}.js`));"""
