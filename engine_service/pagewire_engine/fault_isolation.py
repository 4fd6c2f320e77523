"""What becomes of a step that raised: only the requests at fault are to fail."""

from __future__ import annotations

import logging
from dataclasses import replace

from pagewire.errors import ResourceExhaustedError, UnavailableError
from pagewire_engine.executor.base import Executor
from pagewire_engine.request import Request
from pagewire_engine.schedule import Schedule
from pagewire_engine.step import StepPlan, StepResult

logger = logging.getLogger(__name__)


def execute_apart(
    executor: Executor, schedule: Schedule
) -> tuple[StepResult, list[tuple[Request, Exception]]]:
    """Executes a step that raised once more, in halves, until those at fault are alone.

    A request for which there is no memory though it is alone is tried once more with less at a
    time.

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
        plan = schedule.plan_of(requests)
        error = _try([plan], executor, result)
        if error is None:
            continue
        if len(requests) > 1:
            parts += _halves(requests)
            continue
        if isinstance(error, ResourceExhaustedError) and (smaller := _in_two(plan)):
            error = _try(smaller, executor, result)
        if error is not None:
            logger.error("Request %s failed.", requests[0].request_id, exc_info=error)
            faults.append((requests[0], error))
    return result, faults


def _try(plans: list[StepPlan], executor: Executor, result: StepResult) -> Exception | None:
    """Executes plans one after the other; what they give is told if none has raised."""
    parts: list[StepResult] = []
    try:
        for plan in plans:
            parts.append(executor.execute(plan))  # noqa: PERF401 - all or nothing
    except UnavailableError:
        raise
    except Exception as error:
        return error
    for part in parts:
        result.extend(part)
    return None


def _in_two(plan: StepPlan) -> list[StepPlan]:
    """A request's part of a step as two smaller ones; none where it can't be less."""
    entries = plan.scheduled
    if len(entries) > 1:
        middle = (len(entries) + 1) // 2
        halves = [entries[:middle], entries[middle:]]
    else:
        (entry,) = entries
        # Without a block table it is an encoder's, which computes a prompt in one.
        if entry.num_tokens == 1 or not (entry.block_ids or entry.table_start):
            return []
        middle = entry.num_tokens // 2
        first = replace(entry, num_tokens=middle, sample_for=())
        second = replace(
            entry,
            start=entry.start + middle,
            num_tokens=entry.num_tokens - middle,
            table_start=entry.table_start + len(entry.block_ids),
            block_ids=[],
        )
        halves = [[first], [second]]
    return [replace(plan, scheduled=halves[0]), StepPlan(plan.step, scheduled=halves[1])]


def _halves(requests: list[Request]) -> list[list[Request]]:
    """Both halves that are not empty, the first one last, to be popped."""
    middle = (len(requests) + 1) // 2
    return [half for half in (requests[middle:], requests[:middle]) if half]
