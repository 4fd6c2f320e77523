"""vLLM in a benchmark's child process, run by the interpreter that has it.

Usage: PYTHON -m tests.bench.engine_vllm MODEL_FOLDER DTYPE EAGER(0|1)
"""

from __future__ import annotations

import sys

from tests.bench.child import Generate, serve


def start() -> Generate:
    """Loads the model and compiles it."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        dtype=sys.argv[2],
        enforce_eager=sys.argv[3] == "1",
        max_model_len=1024,
        max_num_seqs=32,
        disable_log_stats=True,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], new_tokens: int, batch: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), batch):
            members = [{"prompt_token_ids": ids} for ids in prompts[first : first + batch]]
            produced = llm.generate(members, params, use_tqdm=False)
            outputs += [list(result.outputs[0].token_ids) for result in produced]
        return outputs

    return generate


if __name__ == "__main__":
    serve(start)
