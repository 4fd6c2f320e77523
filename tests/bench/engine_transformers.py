"""transformers in a benchmark's child process.

Usage: python -m tests.bench.engine_transformers MODEL_FOLDER generate_batch|static [DTYPE]
"""

from __future__ import annotations

import sys

from tests.bench.child import Generate, serve

_PAD = 2


def start() -> Generate:
    """Loads the model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    dtype = getattr(torch, sys.argv[3] if len(sys.argv) > 3 else "float32")
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype).eval()

    def static(prompts: list[list[int]], new_tokens: int, batch: int) -> list[list[int]]:
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), batch):
            members = prompts[first : first + batch]
            width = max(map(len, members))
            ids = torch.tensor([[_PAD] * (width - len(ids)) + ids for ids in members])
            mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in members])
            with torch.inference_mode():
                produced = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                    do_sample=False,
                    pad_token_id=_PAD,
                )
            outputs += produced[:, width:].tolist()
        return outputs

    def continuous(prompts: list[list[int]], new_tokens: int, batch: int) -> list[list[int]]:
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        generation = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=_PAD
        )
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), batch):
            with torch.inference_mode():
                produced = model.generate_batch(
                    inputs=prompts[first : first + batch],
                    generation_config=generation,
                    continuous_batching_config=ContinuousBatchingConfig(
                        num_blocks=64, max_batch_tokens=512
                    ),
                    progress_bar=False,
                )
            outputs += [list(result.generated_tokens) for result in produced.values()]
        return outputs

    return continuous if sys.argv[2] == "generate_batch" else static


if __name__ == "__main__":
    serve(start)
