"""`pagewire bench` as a program: settings in, table or JSON out."""

from __future__ import annotations

import asyncio

import orjson
from pydantic import ValidationError

from pagewire.errors import PagewireError
from pagewire.settings import (
    SettingsError,
    describe_failure,
    describe_invalid,
    exit_with_error,
    failure_status,
)
from pagewire_frontend.bench.report import as_json, as_table
from pagewire_frontend.bench.runner import measure
from pagewire_frontend.bench.settings import BenchOnlySettings, check_target

PROG = "pagewire bench"


def bench(settings: BenchOnlySettings) -> int:
    """Measures, and prints the result.

    Returns:
        The exit status: 1 where some of the requests failed.
    """
    try:
        check_target(settings)
        summary, model = asyncio.run(measure(settings))
    except SettingsError as error:
        exit_with_error(PROG, str(error), error.status)
    except ValidationError as error:  # a rule of the engine
        exit_with_error(PROG, describe_invalid(error, type(settings)))
    except PagewireError as error:
        settings_class = type(settings)
        exit_with_error(
            PROG,
            describe_failure(error, settings_class),
            failure_status(error, settings_class),
        )
    if settings.json:
        print(orjson.dumps(as_json(summary, model, settings)).decode())
    else:
        print(as_table(summary, model, settings))
    return 1 if summary.num_failed else 0
