"""`pagewire serve`: from settings to three running services."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Callable

from pydantic import ValidationError

from pagewire.errors import PagewireError
from pagewire.settings import SettingsError, describe_invalid, exit_with_error, failure_status
from pagewire_frontend.model_download import smollm2_path
from pagewire_frontend.serve_plan import make_plan, make_services
from pagewire_frontend.serve_settings import ServeOnlySettings
from pagewire_frontend.supervisor import AFTER_GRACE_S, StartFailure, Supervisor

_PROG = "pagewire serve"


def serve(settings: ServeOnlySettings) -> int:
    """Runs until it is told to stop.

    Returns:
        The exit status: 0 after SIGINT or SIGTERM, else the status of the service that could not
        be started.
    """
    with contextlib.ExitStack() as folders:
        return _serve(
            settings,
            lambda: folders.enter_context(tempfile.TemporaryDirectory(prefix="pagewire-")),
        )


def _serve(settings: ServeOnlySettings, private_folder: Callable[[], str]) -> int:
    try:
        plan = make_plan(settings, lambda: str(smollm2_path(_say)), private_folder)
    except SettingsError as error:
        exit_with_error(_PROG, str(error), error.status)
    except ValidationError as error:  # a rule of one service
        exit_with_error(_PROG, describe_invalid(error, type(settings)))
    except PagewireError as error:
        exit_with_error(_PROG, str(error), failure_status(error, type(settings)))

    async def run() -> None:
        supervisor = Supervisor(
            make_services(plan),
            ready_line=plan.ready_line,
            # Running requests get the frontend's grace period to end, and its workers more.
            shutdown_timeout_s=plan.frontend.grace_period_s + 1.5 * AFTER_GRACE_S,
            log_format=plan.frontend.log_format,
        )
        await supervisor.run()

    try:
        asyncio.run(run())
    except StartFailure as failure:
        # Its own words have been shown already, as it said them.
        _say(f"{_PROG}: error: {failure}; its lines above say why")
        return failure.status if failure.status > 0 else 1
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
