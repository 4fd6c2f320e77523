"""`pagewire-ui`: the chat page as a program."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pagewire.logs import configure_logging
from pagewire.process_end import end_process
from pagewire.service_name import Program
from pagewire.settings import SettingsError, exit_with_error, parse_settings
from pagewire_ui.config import UiConfig

_PROG = "pagewire-ui"


def main(argv: Sequence[str] | None = None) -> None:
    """Serves the chat page until SIGINT or SIGTERM."""
    config = parse_settings(
        UiConfig,
        argv,
        prog=_PROG,
        description="Serves a chat page that talks to a pagewire frontend. It waits for the "
        "frontend where that is not up yet.",
    )
    # Before Gradio is imported: it reads them then.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    import asyncio

    configure_logging(config.log_level, config.log_format, Program.PAGE)
    try:
        from pagewire_ui.server import PageServer
    except ImportError as error:
        exit_with_error(_PROG, f"{error}: pip install 'pagewire[ui]'", status=1)
    try:
        server = PageServer(config)
        sockets = server.bind()
    except SettingsError as error:
        exit_with_error(_PROG, str(error), error.status)
    asyncio.run(server.run(sockets))
    end_process(0)


if __name__ == "__main__":
    main()
