"""The runner of GPUs gives each row its adapter, in graphs and without, as the reference does."""

from __future__ import annotations

from pathlib import Path

import torch

from pagewire.sampling_params import SamplingParams
from pagewire_engine.adapters.description import AdapterFolder
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.worker.adapters import WorkerAdapters
from pagewire_kernels.dense import TorchDense
from pagewire_kernels.gpu.lora import TritonLora
from tests.fakes.device_executor import DeviceExecutor
from tests.fakes.step_driver import CPU, StepDriver, load
from tests.fakes.tiny_adapters import write_tiny_adapter
from tests.fakes.tiny_models import write_tiny_model

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [11, 12, 13], [5, 6, 7, 8, 9]]
ADAPTERS = [1, 0, 2, 2]
NUM_TOKENS = 3


class TorchDenseWithTritonLora(TorchDense):
    """Linears by torch; adapters by the kernels that steps on a GPU launch."""

    def lora(self) -> TritonLora:
        return TritonLora()


def test_each_row_has_its_adapter_in_graphs_and_without(tmp_path: Path) -> None:
    reference = write_tiny_model(tmp_path / "model", "llama-llama3-rope-tied")
    folders = [tmp_path / "one", tmp_path / "two"]
    write_tiny_adapter(folders[0], reference, seed=1)
    write_tiny_adapter(folders[1], reference, seed=2, target_modules=["embed_tokens", "lm_head"])
    model, description = load(tmp_path / "model")
    driver = StepDriver(model, description.vocab_size, max_loras=2)
    assert driver.adapters is not None
    for number, folder in enumerate(folders, 1):
        driver.adapters.load(number, AdapterFolder(str(folder)))
    expected, _ = driver.greedy(PROMPTS, NUM_TOKENS, ADAPTERS)
    assert expected[0] != expected[1] != expected[3]

    model, _ = load(tmp_path / "model")
    adapters = WorkerAdapters(
        model,
        TorchDenseWithTritonLora(),
        "tiny",
        max_loras=2,
        max_rank=8,
        dtype=torch.float32,
        device=CPU,
    )
    for number, folder in enumerate(folders, 1):
        adapters.load(number, AdapterFolder(str(folder)))
    executor = DeviceExecutor(
        model, num_blocks=16, graph_sizes=(4,), layer_sizes=(16, 32), adapters=adapters
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    new = [
        NewSequence(i, 0, i, prompt, [], params, adapter=number)
        for i, (prompt, number) in enumerate(zip(PROMPTS, ADAPTERS, strict=True))
    ]
    parts = [
        ScheduledSequence(i, 0, len(prompt), 0, [2 * i, 2 * i + 1][: -(-len(prompt) // 4)], (i,))
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs = [[token.token_id] for token in executor.execute(StepPlan(1, new, parts)).sampled]
    for step in range(1, NUM_TOKENS):
        decodes = []
        for i, prompt in enumerate(PROMPTS):
            start = len(prompt) + step - 1
            told = -(-start // 4)
            blocks = [2 * i, 2 * i + 1][told : -(-(start + 1) // 4)]
            decodes.append(ScheduledSequence(i, start, 1, told, blocks, (i,)))
        for token in executor.execute(StepPlan(1 + step, [], decodes)).sampled:
            outputs[token.sequence_id].append(token.token_id)
    assert executor.runner.num_replays == NUM_TOKENS - 1
    assert executor.runner.num_layer_replays == 1  # the prompts
    assert outputs == expected
