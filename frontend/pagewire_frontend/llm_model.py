"""The model of an `LLM`: its engine's client, and the event loop on which its calls run."""

from __future__ import annotations

import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from pagewire.config import EngineConfig
from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire.lora import LoRARequest
from pagewire.sampling_params import SamplingParams
from pagewire.v1 import engine_pb2
from pagewire_frontend.background_loop import BackgroundLoop
from pagewire_frontend.engine_client.base import EngineClient
from pagewire_frontend.faults import renaming
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.llm_outputs import RequestOutput
from pagewire_frontend.llm_run import run_all
from pagewire_frontend.template_files import DEFAULT_TEMPLATE

# Enough to keep most engines' batches full, and few enough for their waiting queues.
_USUAL_IN_FLIGHT = 512

ResultT = TypeVar("ResultT")


class OfflineModel:
    """Its methods may be called from any thread, and from within a running event loop.

    Args:
        client: is started here, and closed by `close`.
        chat_template: a template's text in place of the model's own.
        most_in_flight: prompts that are in the engine at a time.

    Attributes:
        most_in_flight: the same.
        generation: the path of its requests.

    Raises:
        PagewireError: the model can't be loaded; the error says why.
    """

    def __init__(
        self,
        client: EngineClient,
        chat_template: str | None,
        most_in_flight: int = _USUAL_IN_FLIGHT,
    ) -> None:
        self.most_in_flight = most_in_flight
        templates = None if chat_template is None else {DEFAULT_TEMPLATE: chat_template}
        settings = GenerationSettings(allow_request_chat_template=True, chat_templates=templates)
        self._loop = BackgroundLoop("pagewire-llm")
        # Runs when this object goes, and at the interpreter's exit.
        self._close = weakref.finalize(self, _shut_down, self._loop, client)
        try:
            self.generation = self._loop.run(_started(client, settings))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unloads the model. Safe to call twice."""
        self._close()

    def check_open(self) -> None:
        """Raises FailedPreconditionError after `close`."""
        if not self._close.alive:
            raise FailedPreconditionError("this LLM has been shut down; make a new one")

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What the work gives."""
        return self._loop.run(work)

    def run_requests(
        self, requests: list[GenerationRequest], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Checks all, then runs them; see `run_all`."""
        self.check_open()
        return self.run(run_all(self.generation, requests, params, self.most_in_flight, use_tqdm))

    def path_of(self, lora: LoRARequest | None) -> Generation:
        """The path of a call's requests: with an adapter, in the version that its folder holds."""
        self.check_open()
        if lora is None:
            return self.generation
        if not isinstance(lora, LoRARequest):
            raise InvalidArgumentError("lora_request", "must be a LoRARequest")
        return self.run(_load(self.generation, lora))


def most_in_flight(config: EngineConfig) -> int:
    """Twice what the engine computes at a time, or more: its batch is full, and others wait. No
    more than it lets wait: here is nobody who could come again later."""
    return min(max(_USUAL_IN_FLIGHT, 2 * config.max_num_seqs), config.max_waiting_requests)


async def _started(client: EngineClient, settings: GenerationSettings) -> Generation:
    await client.start()
    return await Generation.create(client, settings)


async def _load(generation: Generation, lora: LoRARequest) -> Generation:
    request = engine_pb2.LoadAdapterRequest(
        name=lora.lora_name,
        path=lora.lora_path,
        base_model_name=lora.base_model_name or "",
        in_place=True,
    )
    with renaming({"name": "lora_name", "path": "lora_path"}):
        await generation.client.load_adapter(request)
    await generation.adapters.refresh()
    return generation.for_model(lora.lora_name)


def _shut_down(loop: BackgroundLoop, client: EngineClient) -> None:
    try:
        loop.run(client.close())
    finally:
        loop.close()
