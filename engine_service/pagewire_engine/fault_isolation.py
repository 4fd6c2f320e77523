"""What becomes of a step that raised: only the requests at fault are to fail."""

from __future__ import annotations

import logging

from pagewire.errors import UnavailableError
from pagewire_engine.executor.base import Executor
from pagewire_engine.request import Request
from pagewire_engine.schedule import Schedule
from pagewire_engine.step import StepResult

logger = logging.getLogger(__name__)


def execute_apart(
    executor: Executor, schedule: Schedule
) -> tuple[StepResult, list[tuple[Request, Exception]]]:
    """Executes a step that raised once more, in halves, until those at fault are alone.

    Returns:
        What the others produced, and who is at fault with what they raised.

    Raises:
        UnavailableError: the executor has lost its workers, and that is no request's fault.
    """
    result = StepResult(schedule.plan.step, sampled=[])
    faults: list[tuple[Request, Exception]] = []
    parts = _halves(schedule.requests())
    while parts:
        requests = parts.pop()
        try:
            result.extend(executor.execute(schedule.plan_of(requests)))
        except UnavailableError:
            raise
        except Exception as error:
            if len(requests) > 1:
                parts += _halves(requests)
                continue
            logger.exception("Request %s failed.", requests[0].request_id)
            faults.append((requests[0], error))
    return result, faults


def _halves(requests: list[Request]) -> list[list[Request]]:
    """Both halves that are not empty, the first one last, to be popped."""
    middle = (len(requests) + 1) // 2
    return [half for half in (requests[middle:], requests[:middle]) if half]
