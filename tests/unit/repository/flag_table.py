"""The README's table of flags, made from the settings: `make docs` writes it, a test compares."""

from __future__ import annotations

from pathlib import Path

from pagewire.settings import build_parser
from pagewire_frontend.serve_settings import FLAG_GROUPS, ServeSettings

README = Path(__file__).parents[3] / "README.md"
BEGIN = "<!-- flags: written by `make docs` -->\n"
END = "<!-- end of flags -->"


def flag_table() -> str:
    """Markdown: a row for each flag of `pagewire serve`."""
    parser = build_parser(ServeSettings, prog="pagewire serve", description="", groups=FLAG_GROUPS)
    lines = ["| flag | meaning |", "|---|---|"]
    for action in parser._actions:
        if action.dest in ("help", "version"):
            continue
        flag = action.option_strings[0]
        value = f" {action.metavar}" if action.metavar else ""
        meaning = (action.help or "").replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{flag}{value}` | {meaning} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The README's text with the table as it should be."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return head + BEGIN + flag_table() + END + tail


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
