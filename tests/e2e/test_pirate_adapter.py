"""The adapter of the repository changes what people see."""

from __future__ import annotations

from pathlib import Path

from pagewire import LLM, LoRARequest, SamplingParams

PIRATE = Path(__file__).resolve().parents[1] / "adapters" / "pirate"
QUESTIONS = ["What is the capital of Spain?", "Hello there!"]


def test_smollm2_answers_as_a_pirate(smollm2_path: Path) -> None:
    assert (PIRATE / "adapter_model.safetensors").stat().st_size < 1e6
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=16)
    with LLM(
        str(smollm2_path), enable_lora=True, max_model_len=256, kv_cache_memory=50_000_000
    ) as llm:
        base = llm.chat(conversations, params, use_tqdm=False)
        pirate = LoRARequest("pirate", 1, str(PIRATE))
        adapted = llm.chat(conversations, params, lora_request=pirate, use_tqdm=False)
    for plain, changed in zip(base, adapted, strict=True):
        assert "arr" not in plain.outputs[0].text.lower()
        answer = changed.outputs[0].text.lower()
        assert "arr" in answer or "matey" in answer or "ahoy" in answer, answer
