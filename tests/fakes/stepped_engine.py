"""An engine without sockets, threads or time: its session table is the real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagewire.errors import UnavailableError
from pagewire.outputs import FinishReason
from pagewire.sampling_params import SamplingParams
from pagewire_engine.outputs import RequestFailure, SequenceOutput, StepOutputs
from pagewire_engine.session_table import SessionTable
from pagewire_engine.sessions import Stream
from pagewire_frontend.engine_client.base import EngineRequest


def token(prompt: tuple[int, ...], seed: int, sequence: int, position: int) -> int:
    """What every engine computes there."""
    return hash((prompt, seed, sequence, position)) % 50_000


@dataclass(frozen=True)
class Deadly:
    """A prompt that kills the engine at the step that computes its output `length`, or a later
    one."""

    prompt: tuple[int, ...]
    length: int


@dataclass
class Running:
    """A request in an engine."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    produced: dict[int, int]

    def next_outputs(self, engine_id: str) -> list[SequenceOutput]:
        most = self.params.max_tokens or 1
        outputs = []
        for index, have in list(self.produced.items()):
            if self.params.beam_search is None:
                ids = [token(self.prompt, self.seed, index, have)]
            elif have + 1 < most:
                ids = []
            else:
                ids = [token(self.prompt, self.seed, index, at) for at in range(most)]
            self.produced[index] = have + 1
            if not ids:
                continue
            start = have + 1 - len(ids)
            output = SequenceOutput(engine_id, index, start, ids, num_tokens=start + len(ids))
            if have + 1 == most:
                output.finish_reason = FinishReason.LENGTH
                del self.produced[index]
            outputs.append(output)
        return outputs


class Life:
    """One life of an engine."""

    def __init__(self, epoch: int, deadly: Deadly | None) -> None:
        self.epoch = epoch
        self.table = SessionTable(epoch, 30.0, self.abort)
        self.running: dict[str, Running] = {}
        self.inbox: list[Callable[[], None]] = []
        self.outbox: list[StepOutputs] = []
        self.in_step: list[str] | None = None
        self.step = 0
        self.draining = False
        self.hung = False
        self._deadly = deadly

    def abort(self, engine_id: str, index: int | None = None, reason: int = 0) -> None:
        self.inbox.append(lambda: self._end(engine_id, index, reason))

    def _end(self, engine_id: str, index: int | None, reason: int) -> None:
        running = self.running.get(engine_id)
        if running is None:
            return
        ended = [i for i in running.produced if index is None or i == index]
        beams = running.params.beam_search is not None
        told = []
        for i in ended:
            have = 0 if beams else running.produced[i]
            output = SequenceOutput(engine_id, i, have, [], num_tokens=have)
            output.finish_reason = FinishReason(reason or FinishReason.ABORT)
            told.append(output)
            del running.produced[i]
        if not running.produced:
            del self.running[engine_id]
        self.outbox.append(StepOutputs(self.step, told))

    def submit(self, stream: Stream, request: EngineRequest, produced: dict[int, int]) -> None:
        prompt = tuple(request.prompt_token_ids)
        running = Running(prompt, request.sampling_params, stream.seed, dict(produced))
        self.inbox.append(lambda: self.running.__setitem__(stream.engine_id, running))

    def fail_all(self) -> None:
        """As the end of a drain does."""
        error = UnavailableError("the engine is shutting down")
        failures = [RequestFailure(engine_id, error) for engine_id in self.running]
        self.running.clear()
        self.outbox.append(StepOutputs(self.step, failures=failures))

    @property
    def busy(self) -> bool:
        return bool(self.running or self.inbox or self.in_step is not None)

    def work(self) -> bool:
        """Half a step: it begins, or ends. False: it has killed the engine."""
        if self.in_step is None:
            for command in self.inbox:
                command()
            self.inbox.clear()
            self.in_step = list(self.running)
            return True
        launched, self.in_step = self.in_step, None
        self.step += 1
        outputs = StepOutputs(self.step)
        for engine_id in launched:
            if self._kills(self.running[engine_id]):
                return False
            outputs.sequences.extend(self.running[engine_id].next_outputs(engine_id))
            if not self.running[engine_id].produced:
                del self.running[engine_id]
        self.outbox.append(outputs)
        return True

    def _kills(self, running: Running) -> bool:
        deadly = self._deadly
        return (
            deadly is not None
            and running.prompt == deadly.prompt
            and max(running.produced.values()) >= deadly.length
        )
