"""The worker that a model needs."""

from __future__ import annotations

from pagewire.config import EngineConfig
from pagewire.errors import FailedPreconditionError
from pagewire_engine.model_files import ModelFiles, load_description
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.worker.adapters import WorkerAdapters
from pagewire_engine.worker.encoder_worker import EncoderWorker
from pagewire_engine.worker.worker import Worker


def load_worker(
    config: EngineConfig, files: ModelFiles, grammars: GrammarCompiler | None = None
) -> Worker | EncoderWorker:
    """Loads the model; for the arguments see `Worker`.

    Raises:
        PagewireError: the model, its files or the settings can't be served.
    """
    if files.gguf is None:  # no encoder comes as one
        pooler = load_description(files, config).pooler
        if pooler is not None and pooler.is_encoder:
            return EncoderWorker(config, files)
    return Worker(config, files, grammars)


def adapters_of(worker: Worker | EncoderWorker) -> WorkerAdapters:
    """The LoRA adapters of a worker.

    Raises:
        FailedPreconditionError: it can't load any.
    """
    adapters = worker.adapters if isinstance(worker, Worker) else None
    if adapters is None:
        raise FailedPreconditionError(
            "adapters are not enabled on this engine; start it with --enable-lora"
        )
    return adapters
