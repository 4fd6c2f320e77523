"""The kernels of adapters on CUDA: at the sizes of real models, in graphs, through an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire_engine.adapters.description import AdapterFolder
from pagewire_engine.build import assemble_engine
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.model_files import load_description, resolve_model
from pagewire_engine.submission import Submission
from pagewire_kernels.dispatch_record import recorded
from pagewire_kernels.gpu.lora import TritonLora
from pagewire_kernels.lora import LoraPair, LoraRows, LoraShape, LoraTable, TorchLora
from tests.fakes.engine_run import Answers, answers_to
from tests.fakes.tiny_adapters import write_tiny_adapter
from tests.fakes.tiny_models import VOCAB_SIZE, write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = torch.device("cuda")
NUM_SLOTS = 8
# qkv, gate and up, down and the head of Llama 3.1 8B; odd sizes that no block divides.
SHAPES = [
    LoraShape(4096, (4096, 1024, 1024)),
    LoraShape(4096, (14336, 14336)),
    LoraShape(14336, (4096,)),
    LoraShape(4096, (128256,)),
    LoraShape(577, (40, 24, 70)),
]
# Norm of the error by norm of what is added: roundings of the shrunk, the product and the sum.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
ROWS = (1, 16, 33, 300)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def pairs_of(shape: LoraShape, rank: int, seed: int, dtype: torch.dtype) -> list[LoraPair | None]:
    """Of one adapter; every third lacks its last part."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * size[1] ** -0.5).to(dtype)

    pairs: list[LoraPair | None] = [
        LoraPair(draw(rank, shape.inputs), draw(size, rank), 0.5 + part)
        for part, size in enumerate(shape.parts)
    ]
    if seed % 3 == 2 and len(pairs) > 1:
        pairs[-1] = None
    return pairs


def filled(
    backend: Any, shape: LoraShape, max_rank: int, dtype: torch.dtype, *, first_seed: int = 0
) -> LoraTable:
    """A table with an adapter in each slot, of ranks up to the highest."""
    table: LoraTable = backend.table(shape, NUM_SLOTS, max_rank, dtype, DEVICE)
    for slot in range(NUM_SLOTS):
        rank = max(1, max_rank - 3 * slot)
        pairs = pairs_of(shape, rank, first_seed + slot, dtype)
        table.put(slot, backend.pack(shape, pairs, dtype))
    return table


def slots_of(num_rows: int) -> torch.Tensor:
    """Base and adapters mixed."""
    slots = [(5 * row + 1) % (NUM_SLOTS + 1) - 1 for row in range(num_rows)]
    return torch.tensor(slots, dtype=torch.int32, device=DEVICE)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[found.dtype]


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.inputs}x{shape.outputs}")
def test_a_mixed_batch_gets_what_the_reference_adds(shape: LoraShape, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = filled(TorchLora(), shape, 16, dtype)
    table = filled(TritonLora(), shape, 16, dtype)
    for num_rows in ROWS:
        hidden = torch.randn(num_rows, shape.inputs, device=DEVICE).to(dtype)
        before = torch.randn(num_rows, shape.outputs, device=DEVICE).to(dtype)
        rows = LoraRows(slots_of(num_rows))
        expected, found = before.clone(), before.clone()
        reference.add(hidden, expected, rows)
        with recorded() as kernels:
            table.add(hidden, found, rows)
        assert set(kernels) == {"lora_shrink", "lora_expand"}
        check(found - before, expected - before)
        base = rows.slots < 0
        assert torch.equal(found[base], before[base])
        # The same bits whatever else is in the batch.
        alone = before[-1:].clone()
        table.add(hidden[-1:], alone, LoraRows(rows.slots[-1:]))
        assert torch.equal(alone[0], found[-1])


@pytest.mark.parametrize("rank", [1, 64, 512])
@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_every_rank_that_may_be_asked_for_is_launched(rank: int, dtype: torch.dtype) -> None:
    shape = LoraShape(1024, (512, 128))
    reference, table = (
        filled(backend, shape, rank, dtype) for backend in (TorchLora(), TritonLora())
    )
    hidden = torch.randn(40, shape.inputs, device=DEVICE).to(dtype)
    expected, found = torch.zeros(2, 40, shape.outputs, device=DEVICE, dtype=dtype)
    rows = LoraRows(slots_of(40))
    reference.add(hidden, expected, rows)
    table.add(hidden, found, rows)
    check(found, expected)


def test_embeddings_add_what_their_ids_name() -> None:
    shape, dtype = LoraShape(128256, (4096,)), torch.bfloat16
    tables = []
    for backend in (TorchLora(), TritonLora()):
        table = backend.table(shape, 2, 16, dtype, DEVICE, embedding=True)
        for slot in range(2):
            pairs = pairs_of(shape, 16, slot, dtype)
            table.put(slot, backend.pack(shape, pairs, dtype, embedding=True))
        tables.append(table)
    ids = torch.randint(0, shape.inputs, (33,), device=DEVICE)
    ids[-1] = shape.inputs - 1
    rows = LoraRows(slots_of(33).clamp(max=1))
    expected, found = torch.zeros(2, 33, 4096, device=DEVICE, dtype=dtype)
    tables[0].add_embedded(ids, expected, rows)
    tables[1].add_embedded(ids, found, rows)
    check(found, expected)


def test_a_graph_serves_whatever_adapters_its_rows_have_and_no_launch_waits() -> None:
    shape, dtype, num_rows = SHAPES[0], torch.bfloat16, 32
    table = filled(TritonLora(), shape, 16, dtype)
    reference = filled(TorchLora(), shape, 16, dtype)
    hidden = torch.randn(num_rows, shape.inputs, device=DEVICE).to(dtype)
    output = torch.zeros(num_rows, shape.outputs, device=DEVICE, dtype=dtype)
    slots = torch.full((num_rows,), -1, dtype=torch.int32, device=DEVICE)
    table.add(hidden, output, LoraRows(slots))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.add(hidden, output, LoraRows(slots))
    taken = torch.cuda.memory_allocated()
    for turn in range(3):
        slots.copy_(slots_of(num_rows).roll(turn))
        if turn == 2:  # another adapter comes into a slot
            pairs = pairs_of(shape, 16, 99, dtype)
            for backend, each in ((TritonLora(), table), (TorchLora(), reference)):
                each.put(3, backend.pack(shape, pairs, dtype))
        hidden.normal_()
        output.zero_()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = torch.zeros_like(output)
        reference.add(hidden, expected, LoraRows(slots.clone()))
        check(output, expected)
        first = output.clone()
        for _ in range(50):
            output.zero_()
            graph.replay()
            assert torch.equal(output, first), "a race"
    assert torch.cuda.memory_allocated() - taken < 64 << 20


class InMemory:
    """All adapters are there, all the time."""

    def want(self, number: int) -> None:
        pass

    def let_go(self, number: int) -> None:
        pass

    def is_ready(self, number: int) -> bool:
        return True

    def release(self, number: int) -> None:
        pass


def answers(
    folder: Path, adapters: list[Path], device: str = "cuda", **settings: Any
) -> tuple[Answers, Any]:
    """What an engine says to prompts of the base and of each adapter, together; and its runner."""
    config = EngineConfig(
        model=str(folder),
        device=device,
        dtype="float32",
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=2,
        max_model_len=96,
        max_num_seqs=16,
        num_gpu_blocks_override=200,
        **settings,
    )
    files = resolve_model(config)
    executor = SingleProcessExecutor(config, files)
    for number, path in enumerate(adapters, 1):
        executor.load_adapter(number, AdapterFolder(str(path)))
    eos = load_description(files, config).eos_token_ids
    engine = assemble_engine(executor, config, eos, adapters=InMemory())
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = []
    for number in range(3 * (len(adapters) + 1)):
        adapter = number % (len(adapters) + 1)
        prompt = [(7 * i + number // 2) % VOCAB_SIZE for i in range(5 + 9 * (number % 4))]
        requests.append(
            Submission(
                f"{number}", prompt, params, adapter=adapter, cache_key=f"{adapter}" * bool(adapter)
            )
        )
    told = answers_to(engine, requests)
    assert executor._worker is not None
    runner = executor._worker._runner
    engine.close()
    executor.shutdown()
    return told, runner


def test_an_engine_mixes_more_adapters_than_places_as_the_reference_does(tmp_path: Path) -> None:
    reference = write_tiny_model(tmp_path / "model", "llama-llama3-rope-tied")
    adapters = [tmp_path / f"adapter-{number}" for number in range(4)]
    for seed, path in enumerate(adapters):
        targets = {"target_modules": ["embed_tokens", "lm_head", "v_proj"]} if seed == 3 else {}
        write_tiny_adapter(path, reference, seed=seed, **targets)
    expected, _ = answers(tmp_path / "model", adapters, attention_backend="torch")
    assert len({tuple(tokens) for (tokens,) in expected.values()}) > len(adapters)
    for enforce_eager in (True, False):
        found, runner = answers(
            tmp_path / "model", adapters, attention_backend="triton", enforce_eager=enforce_eager
        )
        assert found == expected
        assert (runner.num_replays > 0) is not enforce_eager
        assert (runner.num_layer_replays > 0) is not enforce_eager
