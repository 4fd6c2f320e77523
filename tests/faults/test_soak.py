"""Ten thousand requests over both wires (one thousand where slow tests are left out) while clients
leave, run out of time and send what breaks a step: nothing leaks, everybody gets one answer, and
memory stays what it was."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from pathlib import Path

import pytest

from pagewire.errors import ErrorCode, PagewireError
from pagewire.outputs import FinishReason
from pagewire.sampling_params import SamplingParams
from pagewire_engine.step import StepPlan
from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.e2e.wire_peer import wait_until_async
from tests.fakes.fake_engine import FakeEngine, fake_config

AT_A_TIME = 48
POISON = 999
NUM_BLOCKS, NUM_CPU_BLOCKS = 20, 16
# Ends of these kinds; a client that has left is not told any.
ANSWERED, LEFT, TIMED_OUT, FAILED = "answered", "left", "timed out", "failed"


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class Soak:
    def __init__(self, client: RemoteEngineClient) -> None:
        self.client = client
        self.ends: Counter[str] = Counter()
        self.resident: list[float] = []

    async def one(self, number: int, dice: random.Random) -> str:
        params = SamplingParams(
            n=dice.choice([1, 1, 1, 2, 3]),
            temperature=1.0,
            seed=number,
            max_tokens=dice.randint(1, 24),
            ignore_eos=True,
        )
        beginning = [dice.randint(1, 4)] * dice.choice([0, 16, 40])
        prompt = beginning + [dice.randint(1, 900) for _ in range(dice.randint(1, 30))]
        if dice.random() < 0.02:
            prompt.append(POISON)
        patience = dice.choice([None] * 6 + [0.0, 0.005, 0.02])
        leaves_after = dice.choice([None] * 6 + [0, 1, 5])
        request = EngineRequest(f"soak-{number}", prompt, params, tenant=str(number % 3))
        try:
            async with asyncio.timeout(patience):
                return await self.read(request, leaves_after)
        except TimeoutError:
            return TIMED_OUT
        except PagewireError as error:
            if error.code is ErrorCode.INTERNAL and POISON in prompt:
                return FAILED
            raise  # somebody else's fault became this request's

    async def read(self, request: EngineRequest, leaves_after: int | None) -> str:
        stream = await self.client.submit(request)
        counts = [0] * request.sampling_params.n
        reasons: dict[int, FinishReason] = {}
        try:
            async for deltas in stream:
                for delta in deltas:
                    assert delta.sequence_index not in reasons, "told of after its end"
                    assert delta.start == counts[delta.sequence_index], "lost, or repeated"
                    counts[delta.sequence_index] += len(delta.token_ids)
                    if delta.finish_reason is not None:
                        reasons[delta.sequence_index] = delta.finish_reason
                if leaves_after is not None and sum(counts) > leaves_after:
                    return LEFT
        finally:
            await stream.abort()
        assert len(reasons) == len(counts), "not every sequence has ended"
        assert set(counts) == {request.sampling_params.max_tokens}
        return ANSWERED

    async def worker(self, numbers: list[int], dice: random.Random) -> None:
        while numbers:
            self.ends[await self.one(numbers.pop(), dice)] += 1
            if self.ends.total() % 200 == 0:
                gc.collect()
                self.resident.append(resident_mb())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_requests", "overlaps"),
    [
        (1000, True),
        pytest.param(5000, True, marks=pytest.mark.slow),
        pytest.param(5000, False, marks=pytest.mark.slow),
    ],
)
async def test_nothing_leaks_and_everybody_is_answered(overlaps: bool, num_requests: int) -> None:
    dice = random.Random(7)

    def fail_now_and_then(plan: StepPlan) -> None:
        sequences = engine.built.executor.sequences  # type: ignore[attr-defined]  # a FakeExecutor
        if any(POISON in sequences[e.sequence_id].new.prompt_token_ids for e in plan.scheduled):
            raise RuntimeError("poisoned")

    config = fake_config(
        max_num_seqs=24,
        max_num_batched_tokens=96,
        max_waiting_requests=1000,
        async_scheduling=overlaps,
        preemption_mode="auto",
        log_level="error",
    )
    with FakeEngine(
        config,
        num_blocks=NUM_BLOCKS,
        num_cpu_blocks=NUM_CPU_BLOCKS,
        # So that requests meet on any machine, and run short of blocks.
        step_time_s=0.001,
        on_execute=fail_now_and_then,
        max_model_len=128,
    ) as engine:
        client = RemoteEngineClient(engine.target)
        await client.start()
        soak = Soak(client)
        numbers = list(range(num_requests))
        workers = [soak.worker(numbers, random.Random(dice.random())) for _ in range(AT_A_TIME)]
        await asyncio.gather(*workers)
        core = engine.built.engine
        await wait_until_async(lambda: not core.has_work, "the engine comes to rest")
        await client.close()
        queues, stats = core.queues, core.stats()
        queues.blocks.check()
        assert queues.blocks.num_available_blocks == NUM_BLOCKS
        assert queues.blocks.num_free_cpu_blocks == NUM_CPU_BLOCKS
    assert sum(soak.ends.values()) == num_requests
    least = num_requests // 250
    assert min(soak.ends[kind] for kind in (ANSWERED, LEFT, TIMED_OUT, FAILED)) > least, soak.ends
    # What it was to meet, it has met.
    assert stats.num_preemptions - queues.num_swaps > least
    assert queues.num_swaps > least
    assert stats.prefix_cache_hits > 0
    # Flat: the second half of the run adds next to nothing.
    half = soak.resident[len(soak.resident) // 2]
    assert soak.resident[-1] - half < 8, soak.resident
