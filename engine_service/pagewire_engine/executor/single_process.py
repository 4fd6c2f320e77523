"""The worker in this process: one device, no hand-over."""

from __future__ import annotations

from pagewire.config import EngineConfig
from pagewire.errors import UnavailableError
from pagewire_engine.adapters.description import (
    AdapterDescription,
    AdapterFolder,
    AdapterMemory,
)
from pagewire_engine.executor.base import PendingStep
from pagewire_engine.model_files import ModelFiles
from pagewire_engine.step import StepPlan, StepResult, WorkerInfo
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.worker.encoder_worker import EncoderWorker
from pagewire_engine.worker.load_worker import adapters_of, load_worker
from pagewire_engine.worker.worker import Worker


class SingleProcessExecutor:
    """Implements Executor by direct calls."""

    def __init__(
        self, config: EngineConfig, model: ModelFiles, grammars: GrammarCompiler | None = None
    ) -> None:
        """Loads the model.

        Args:
            config: the engine's settings.
            model: its files.
            grammars: what the requests' constraints are compiled by; None: by one of its own.

        Raises:
            PagewireError: the model, its files or the settings can't be served.
        """
        worker = load_worker(config, model, grammars)
        self._worker: Worker | EncoderWorker | None = worker
        self._info = worker.info()

    def info(self) -> WorkerInfo:
        return self._info

    @property
    def launches_ahead(self) -> bool:
        return self._worker is not None and self._worker.launches_ahead

    def launch(self, plan: StepPlan) -> PendingStep:
        return self._live_worker.launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def load_adapter(self, number: int, folder: AdapterFolder) -> AdapterDescription:
        return adapters_of(self._live_worker).load(number, folder)

    def drop_adapter(self, number: int) -> None:
        adapters_of(self._live_worker).drop(number)

    def adapter_memory(self) -> AdapterMemory:
        return adapters_of(self._live_worker).memory()

    def shutdown(self) -> None:
        self._worker = None

    @property
    def _live_worker(self) -> Worker | EncoderWorker:
        if self._worker is None:
            raise UnavailableError("the executor was shut down")
        return self._worker
