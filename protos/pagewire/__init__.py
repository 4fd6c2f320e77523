"""pagewire: an LLM inference service. `LLM`, `SamplingParams`, `StructuredOutput`,
`BeamSearchParams`, `PoolingParams` and `LoRARequest` are the offline API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagewire.beam_search_params import BeamSearchParams
    from pagewire.lora import LoRARequest
    from pagewire.pooling import PoolingParams
    from pagewire.sampling_params import SamplingParams
    from pagewire.structured_output import StructuredOutput
    from pagewire_frontend.llm import LLM, load_chat_template

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "LoRARequest",
    "PoolingParams",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
    "load_chat_template",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import pagewire.v1` stays light and the wheels can be installed apart.
    if name == "SamplingParams":
        from pagewire.sampling_params import SamplingParams

        return SamplingParams
    if name == "BeamSearchParams":
        from pagewire.beam_search_params import BeamSearchParams

        return BeamSearchParams
    if name == "PoolingParams":
        from pagewire.pooling import PoolingParams

        return PoolingParams
    if name == "LoRARequest":
        from pagewire.lora import LoRARequest

        return LoRARequest
    if name == "StructuredOutput":
        from pagewire.structured_output import StructuredOutput

        return StructuredOutput
    if name in ("LLM", "load_chat_template"):
        from pagewire_frontend import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'pagewire' has no attribute {name!r}")
