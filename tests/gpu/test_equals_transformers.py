"""Models on CUDA equal transformers: each backend, with and without graphs, chunked and cached.

In fp32 the greedy tokens are the same; in bf16 log probabilities are as near to the truth as those
of transformers in bf16.
"""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire_engine.models.rotary import head_dim_of
from pagewire_engine.models.weight_loading import loader
from pagewire_kernels.attention import BackendUnavailableError, load_attention_backend
from tests.bench.gpu.workloads import MODELS
from tests.fakes.state_source import StateSource
from tests.fakes.tiny_models import TINY_MODELS, tiny_reference
from tests.gpu.reference import Answers, Reference, ask, check_greedy, check_logprobs, model_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = "cuda"
_FIELDS = EngineConfig.model_fields
_BACKENDS = [
    name
    for name in typing.get_args(_FIELDS["attention_backend"].annotation)
    if name not in ("auto", "cpu")
]
_HAS_GRAPHS = "enforce_eager" in _FIELDS
# Without graphs, some that differ in attention; bf16 too.
_SOME = ["gpt2-tied", "llama-llama3-rope-tied", "mistral-window", "qwen3-layer-types"]
# There a prompt's length chooses between two sets of angles, here the engine's limit does: see
# tests/numerics/test_rotary_scaling.py.
_OF_OTHER_ANGLES = {"llama-longrope"}
_TINY = {"block_size": 8, "max_model_len": 128}
_TINY_LENGTHS, _TINY_NEW = (5, 33, 61), 24
_LARGE_LENGTHS, _LARGE_NEW = (7, 130, 257, 600), 24


@pytest.fixture(params=_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each attention backend that the settings offer. Only optional packages may be missing."""
    try:
        load_attention_backend(request.param, CUDA)
    except BackendUnavailableError as error:
        if request.param == "xformers":
            pytest.skip(str(error))
        raise
    return str(request.param)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _prompts(lengths: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _check_paths(answers: Answers, *, chunked: bool, cached: bool) -> None:
    """The path that was to be tested was taken."""
    num_requests = len(answers.answers) + len(answers.again)
    assert (answers.stats.num_prefill_chunks > num_requests) == chunked
    assert (answers.stats.prefix_cache_hits > 0) == cached
    assert answers.stats.num_preemptions == 0


def _graphs(wanted: bool) -> dict[str, Any]:
    return {"enforce_eager": not wanted} if _HAS_GRAPHS else {}


graphs = pytest.mark.parametrize(
    "graphs", [True, False] if _HAS_GRAPHS else [False], ids=lambda on: "graphs" if on else "eager"
)


@functools.cache
def _tiny(name: str) -> tuple[tempfile.TemporaryDirectory[str], Reference]:
    folder = tempfile.TemporaryDirectory()
    model = tiny_reference(name)
    model.save_pretrained(folder.name)
    return folder, Reference(model.to(CUDA))


def _ask_tiny(name: str, backend: str, graphs: bool, **settings: Any) -> Answers:
    folder, reference = _tiny(name)
    head_dim = head_dim_of(reference.model.config)
    if head_dim % load_attention_backend(backend, CUDA).head_dim_multiple:
        pytest.skip(f"{backend} has no heads of {head_dim}")
    prompts = _prompts(_TINY_LENGTHS, reference.model.config.vocab_size)
    settings |= _TINY | _graphs(graphs) | {"attention_backend": backend, "device": CUDA}
    return ask(model_config(Path(folder.name), **settings), prompts, _TINY_NEW)


@pytest.mark.parametrize(
    ("name", "graphs"),
    dict.fromkeys(
        [
            *((name, _HAS_GRAPHS) for name in sorted(TINY_MODELS.keys() - _OF_OTHER_ANGLES)),
            *((name, False) for name in _SOME),
        ]
    ),
)
def test_tiny_models_say_what_transformers_says(name: str, graphs: bool, backend: str) -> None:
    """Whole, and then chunked and asked again of the prefix cache."""
    whole = _ask_tiny(name, backend, graphs, dtype="float32")
    _check_paths(whole, chunked=False, cached=False)
    check_greedy(_tiny(name)[1], whole.answers)
    parts = _ask_tiny(
        name,
        backend,
        graphs,
        dtype="float32",
        max_num_batched_tokens=24,
        enable_prefix_caching=True,
    )
    _check_paths(parts, chunked=True, cached=True)
    check_greedy(_tiny(name)[1], [*parts.answers, *parts.again])


@pytest.mark.parametrize("name", _SOME)
def test_tiny_models_are_as_exact_in_bf16_as_transformers(name: str, backend: str) -> None:
    answers = _ask_tiny(name, backend, _HAS_GRAPHS, dtype="bfloat16").answers
    check_logprobs(_tiny(name)[1], answers, torch.bfloat16, tolerance=2.0)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Reference]]:
    """The 1B shape with transformers' own initialisation; its weights stay in memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("large")
    shutil.copy(MODELS["1b"].folder / "config.json", folder)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    with torch.device(CUDA):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    yield folder, Reference(model.eval())
    del model
    torch.cuda.empty_cache()


@pytest.fixture
def large_weights(large: tuple[Path, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are to make dummy weights get the reference's."""
    state = large[1].model.state_dict()
    monkeypatch.setattr(loader, "DummySource", lambda places, seed: StateSource(state))


@pytest.mark.usefixtures("large_weights")
@graphs
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "chunked-and-cached"])
def test_a_1b_shape_says_what_transformers_says(
    large: tuple[Path, Reference], backend: str, graphs: bool, parts: bool
) -> None:
    folder, reference = large
    prompts = _prompts(_LARGE_LENGTHS, 128_000)
    settings: dict[str, Any] = _graphs(graphs) | {"dtype": "float32", "attention_backend": backend}
    if parts:
        settings |= {"max_num_batched_tokens": 192, "enable_prefix_caching": True}
    config = model_config(folder, device=CUDA, load_format="dummy", **settings)
    found = ask(config, prompts, _LARGE_NEW)
    _check_paths(found, chunked=parts, cached=parts)
    check_greedy(reference, [*found.answers, *found.again])


@pytest.mark.usefixtures("large_weights")
@graphs
def test_a_1b_shape_is_as_exact_in_bf16_as_transformers(
    large: tuple[Path, Reference], backend: str, graphs: bool
) -> None:
    folder, reference = large
    prompts = _prompts(_LARGE_LENGTHS, 128_000)
    settings = _graphs(graphs) | {"dtype": "bfloat16", "attention_backend": backend}
    config = model_config(folder, device=CUDA, load_format="dummy", **settings)
    found = ask(config, prompts, _LARGE_NEW)
    check_logprobs(reference, found.answers, torch.bfloat16, tolerance=0.5)
