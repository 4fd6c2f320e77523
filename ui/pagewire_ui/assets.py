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
        const events = [{names}];
        const root = (window.gradio_config?.root ?? '').replace(/\\/$/, '');
        import(`${{root}}/{url_path()}/{script}.js`).then((script) =>
          script.mount(element, {{ trigger, props, watch }}));
        """,
        apply_default_css=False,
        **arguments,
    )


def imported(script: str, expression: str, parameters: str = "") -> str:
    """A JavaScript function for an event of Gradio's: it imports a script as `script` and gives the
    expression's value.

    Args:
        script: its name, without folder.
        expression: may await.
        parameters: names of the function's parameters, the event's inputs.
    """
    return f"""async ({parameters}) => {{
      const root = (window.gradio_config?.root ?? '').replace(/\\/$/, '');
      const script = await import(`${{root}}/{url_path()}/{script}.js`);
      return {expression};
    }}"""
