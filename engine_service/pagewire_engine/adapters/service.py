"""The adapters' control calls, whichever way they come."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from pagewire.config import EngineConfig
from pagewire.errors import FailedPreconditionError, InvalidArgumentError, PagewireError
from pagewire.lora import LoraModule
from pagewire.v1 import engine_pb2
from pagewire_engine.adapters.description import AdapterMemory
from pagewire_engine.adapters.files import anywhere, resolve_folder
from pagewire_engine.adapters.loadable import LoadablePaths
from pagewire_engine.adapters.loaded import LoadedAdapter, LoadRequest
from pagewire_engine.adapters.registry import AdapterRegistry
from pagewire_engine.engine_loop import EngineLoop
from pagewire_engine.errors import StartupError
from pagewire_engine.submission import Submission

_MOST_PATH_LENGTH = 4096
_States = engine_pb2.AdapterInfo.State


class AdapterService:
    """Answers in messages. Every method may be called from any thread.

    Args:
        registry: None where no adapter can be loaded.
        loop: runs their requests.
        config: the engine's settings.
        served_model_name: what clients call the model.
    """

    def __init__(
        self,
        registry: AdapterRegistry | None,
        loop: EngineLoop,
        config: EngineConfig,
        served_model_name: str,
    ) -> None:
        self._registry = registry
        self._loop = loop
        self._config = config
        self._served_model_name = served_model_name
        self._loadable = LoadablePaths(config.lora_dir)
        if registry is not None:
            registry.attach(loop.fail_adapter, loop.wake)

    @property
    def enabled(self) -> bool:
        """Whether adapters can be loaded."""
        return self._registry is not None

    def limits(self) -> engine_pb2.AdapterLimits:
        """The settings."""
        return engine_pb2.AdapterLimits(
            max_loras=self._config.max_loras,
            max_cpu_loras=self._config.num_host_adapters,
            max_lora_rank=self._config.max_lora_rank,
        )

    def load(
        self, request: engine_pb2.LoadAdapterRequest, *, confined: bool = True
    ) -> engine_pb2.LoadAdapterResponse:
        """Loads an adapter.

        Args:
            request: what.
            confined: to `--lora-dir`; not so for the operator's own calls.

        Raises:
            PagewireError: it can't be loaded; the error says why.
        """
        registry = self._enabled("name")
        if len(request.path) > _MOST_PATH_LENGTH:
            raise InvalidArgumentError("path", f"has more than {_MOST_PATH_LENGTH} characters")
        if confined:
            folder = resolve_folder(request.path, self._config.lora_dir)
        else:
            folder = anywhere(request.path)
        adapter = registry.load(
            LoadRequest(
                name=request.name,
                folder=folder,
                path=request.path,
                base_model_name=request.base_model_name,
                in_place=request.in_place,
                version=request.version,
            )
        )
        info = self._info(adapter, registry.memory(), self._loop.requests_by_adapter())
        return engine_pb2.LoadAdapterResponse(adapter=info)

    def unload(
        self, request: engine_pb2.UnloadAdapterRequest, still_wanted: Callable[[], bool]
    ) -> engine_pb2.UnloadAdapterResponse:
        """Unloads an adapter, when nobody uses it any more.

        Args:
            request: which, and what becomes of its requests.
            still_wanted: whether the caller still waits.

        Raises:
            PagewireError: it stays; the error says why.
        """
        registry = self._enabled("name")
        modes = engine_pb2.UnloadAdapterRequest
        if request.mode not in (modes.MODE_UNSPECIFIED, modes.MODE_WAIT, modes.MODE_ABORT):
            raise InvalidArgumentError("mode", f"{request.mode} is none of its values")
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise InvalidArgumentError("timeout_s", "must be seconds, 0 or above")
        unloaded = registry.unload(
            request.name,
            ends_requests=request.mode == modes.MODE_ABORT,
            timeout_s=timeout_s,
            still_wanted=still_wanted,
        )
        return engine_pb2.UnloadAdapterResponse(
            num_ended_requests=unloaded.num_ended,
            host_bytes=unloaded.host_bytes,
            device_bytes=unloaded.device_bytes,
        )

    def list(self, unless_revision: str = "") -> engine_pb2.ListAdaptersResponse:
        """What is loaded, and where it is; nothing where that is known in this revision."""
        registry = self._enabled("")
        # First: what changes meanwhile is told again, and not missed.
        revision = registry.revision()
        if revision == unless_revision:
            return engine_pb2.ListAdaptersResponse(revision=revision)
        memory, requests = registry.memory(), self._loop.requests_by_adapter()
        adapters = [self._info(each, memory, requests) for each in registry.adapters()]
        adapters += [
            engine_pb2.AdapterInfo(name=name, path=path, state=_States.STATE_LOADING)
            for name, path in registry.loading().items()
        ]
        adapters.sort(key=lambda each: each.name)
        return engine_pb2.ListAdaptersResponse(
            adapters=adapters,
            limits=self.limits(),
            loadable_paths=self._loadable.paths(),
            revision=revision,
        )

    def hand_over(
        self, submission: Submission, name: str, version: str, take: Callable[[Submission], None]
    ) -> str:
        """Hands a request over with the adapter that it names, which is held until its end.

        Args:
            submission: without its adapter.
            name: the adapter's; "": none.
            version: see AdapterRegistry.hold.
            take: is given it.

        Returns:
            The version in force.

        Raises:
            PagewireError: there is no such adapter, or `take` has raised.
        """
        if not name:
            take(submission)
            return ""
        registry = self._enabled("adapter")
        hold = registry.hold(name, version, resubmission=submission.resubmission)
        try:
            take(replace(submission, adapter=hold.number, cache_key=hold.cache_key))
        except BaseException:
            registry.release(hold.number)
            raise
        return hold.version

    def files_of(self, name: str, version: str = "") -> dict[str, bytes]:
        """See AdapterRegistry.files_of."""
        return dict(self._enabled("adapter").files_of(name, version))

    def stats(self) -> engine_pb2.AdapterStats | None:
        """Figures; None where no adapter can be loaded."""
        if self._registry is None:
            return None
        memory, requests = self._registry.memory(), self._loop.requests_by_adapter()
        adapters = self._registry.adapters()
        names = {each.number: each.name for each in adapters}
        of = {number: counts for number, counts in requests.items() if number in names}
        return engine_pb2.AdapterStats(
            num_loaded=len(adapters),
            num_on_host=len(memory.host),
            num_on_device=len(memory.device),
            running=sorted({names[number] for number, (running, _) in of.items() if running}),
            waiting=sorted({names[number] for number, (_, waiting) in of.items() if waiting}),
            num_host_loads=memory.num_host_loads,
            num_device_loads=memory.num_device_loads,
            num_host_evictions=self._registry.num_evictions,
        )

    def _enabled(self, field: str) -> AdapterRegistry:
        if self._registry is None:
            raise FailedPreconditionError(
                "adapters are not enabled on this engine; start it with --enable-lora", field=field
            )
        return self._registry

    def _info(
        self,
        adapter: LoadedAdapter,
        memory: AdapterMemory,
        requests: dict[int, tuple[int, int]],
    ) -> engine_pb2.AdapterInfo:
        described = adapter.description
        on_host = adapter.number in memory.host
        on_device = adapter.number in memory.device
        state = _States.STATE_DEVICE if on_device else _States.STATE_HOST
        if not on_host:
            state = _States.STATE_DISK
        if adapter.is_leaving:
            state = _States.STATE_LEAVING
        num_running = requests.get(adapter.number, (0, 0))[0]
        return engine_pb2.AdapterInfo(
            name=adapter.name,
            path=adapter.path,
            version=adapter.version,
            rank=described.rank,
            bytes=described.num_bytes,
            state=state,
            parent=adapter.parent,
            root=self._served_model_name,
            alpha=described.alpha,
            use_rslora=described.use_rslora,
            modules=described.modules,
            host_bytes=described.num_bytes if on_host else 0,
            device_bytes=memory.device.get(adapter.number, 0),
            num_running_requests=num_running,
            # Those on their way to the queue too.
            num_waiting_requests=max(0, adapter.num_holds - num_running),
            has_chat_template=any(_is_template(each) for each in adapter.files)
            or b'"chat_template"' in adapter.files.get("tokenizer_config.json", b""),
            has_tokenizer="tokenizer.json" in adapter.files,
            loaded_at=adapter.loaded_at,
            from_settings=adapter.from_settings,
        )


def load_from_settings(registry: AdapterRegistry, config: EngineConfig) -> None:
    """Loads the adapters that `--lora-modules` names.

    Raises:
        StartupError: one can't be loaded.
    """
    for text in config.lora_modules:
        module = LoraModule.parse(text)
        try:
            registry.load(
                LoadRequest(
                    name=module.name,
                    folder=anywhere(module.path),
                    path=module.path,
                    base_model_name=module.base_model_name,
                    from_settings=True,
                )
            )
        except PagewireError as error:
            raise StartupError(f"{module.name}: {error.message}", field="lora_modules") from error


def _is_template(file: str) -> bool:
    return file in ("chat_template.jinja", "chat_template.json") or file.endswith(".jinja")
