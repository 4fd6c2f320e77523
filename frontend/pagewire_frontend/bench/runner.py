"""Runs a workload against a target and measures it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from tqdm.auto import tqdm

from pagewire.errors import FailedPreconditionError, InvalidArgumentError, PagewireError
from pagewire.tls import ClientTls
from pagewire_frontend.bench.measurement import RequestMeasurement, Summary, summarize
from pagewire_frontend.bench.settings import BenchOnlySettings, engine_config
from pagewire_frontend.bench.targets import OfflineTarget, ServerTarget, Target
from pagewire_frontend.bench.workload import BenchRequest, make_workload
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.model_download import MODEL_NAME, smollm2_path

Slots = AbstractAsyncContextManager[None]


async def measure(settings: BenchOnlySettings) -> tuple[Summary, str]:
    """Opens the target, runs the workload, and closes it.

    Returns:
        What was measured, and the model's name.

    Raises:
        PagewireError: the target can't be opened, the workload does not fit it, or all of it
            failed.
    """
    async with _opened(settings) as target:
        return await run_workload(target, settings), target.model


async def run_workload(target: Target, settings: BenchOnlySettings) -> Summary:
    """The workload's warm-up, then its measured part.

    Raises:
        PagewireError: a prompt and its answer do not fit the model's context, or every request
            failed.
    """
    requests = make_workload(settings, await target.token_pool())
    for request in requests:
        length = len(request.token_ids) + request.output_len
        if length > target.max_model_len:
            raise InvalidArgumentError(
                "prompt_len",
                f"prompt and answer of {length} tokens are longer than the model's context of "
                f"{target.max_model_len}; make --prompt-len, --output-len or --shared-prefix-len "
                "smaller",
            )
    limit = settings.concurrency_limit
    slots: Slots = nullcontext() if limit is None else asyncio.Semaphore(limit)
    await _run_all(target, requests[: settings.warmup], slots, lambda _: None)
    rest = requests[settings.warmup :]
    at_rate = settings.request_rate is not None
    num_tokens = sum(request.output_len for request in rest)
    with tqdm(total=num_tokens, desc="Output", unit="tok", file=sys.stderr) as progress:
        outcomes = await _run_all(target, rest, slots, progress.update, at_rate=at_rate)
    measured = [one for one in outcomes if isinstance(one, RequestMeasurement)]
    failures = [one for one in outcomes if isinstance(one, PagewireError)]
    if not measured:
        raise failures[0]
    return summarize(measured, len(failures))


async def _run_all(
    target: Target,
    requests: Sequence[BenchRequest],
    slots: Slots,
    count: Callable[[int], object],
    *,
    at_rate: bool = False,
) -> list[RequestMeasurement | PagewireError]:
    start = time.monotonic()

    async def run(request: BenchRequest) -> RequestMeasurement | PagewireError:
        due = start + request.arrival_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        async with slots:
            # At a rate the wait for a slot counts: clients would have sent it by then.
            sent_at = due if at_rate else time.monotonic()
            measurement = RequestMeasurement(len(request.token_ids), sent_at)

            def on_tokens(num_tokens: int) -> None:
                measurement.arrivals.append((time.monotonic(), num_tokens))
                count(num_tokens)

            try:
                measurement.times = await target.run(request, on_tokens)
            except PagewireError as error:
                return error
            measurement.ended_at = time.monotonic()
            return measurement

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(request)) for request in requests]
    return [task.result() for task in tasks]


@asynccontextmanager
async def _opened(settings: BenchOnlySettings) -> AsyncIterator[Target]:
    if settings.target is not None:
        key = settings.api_key
        server = ServerTarget(
            settings.target,
            None if key is None else key.get_secret_value(),
            ClientTls.from_settings(
                "--target-", settings.target_ca, settings.target_cert, settings.target_key
            ),
        )
        try:
            await server.connect()
            yield server
        finally:
            await server.close()
        return
    try:
        # Here, since it brings the engine and torch along.
        from pagewire_frontend.engine_client.in_process import InProcessEngineClient
    except ImportError as error:
        raise FailedPreconditionError(
            f"a model can't be loaded here ({error}): pip install 'pagewire[engine]', or measure "
            "a running server by --target"
        ) from None
    config = (
        engine_config(settings, settings.model)
        if settings.model is not None
        else engine_config(settings, str(smollm2_path(_say)), served_model_name=MODEL_NAME)
    )
    client = InProcessEngineClient(config, _say)
    try:
        await client.start()
        yield OfflineTarget(await Generation.create(client, GenerationSettings()))
    finally:
        await client.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
