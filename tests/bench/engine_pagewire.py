"""pagewire in a benchmark's child process: the real engine and its loop, no wires.

Usage: python -m tests.bench.engine_pagewire MODEL [SETTING=VALUE ...]
"""

from __future__ import annotations

import queue
import sys

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire_engine.build import build_engine
from pagewire_engine.engine_loop import EngineLoop
from pagewire_engine.outputs import StepOutputs
from pagewire_engine.submission import Submission
from tests.bench.child import Generate, serve

# Holds the whole workload in fp32: 32 sequences of up to 384 tokens, without preemption.
_KV_CACHE_BYTES = 512 << 20


def start() -> Generate:
    """Loads the model and starts the loop."""
    settings = dict(argument.split("=", 1) for argument in sys.argv[2:])
    config = EngineConfig.model_validate(
        {
            "model": sys.argv[1],
            "kv_cache_memory": _KV_CACHE_BYTES,
            "num_threads": 2,
            "skip_tokenizer_init": True,
            # Each prompt is prefilled twice, to be timed alone; no peer remembers it either.
            "enable_prefix_caching": False,
            **settings,
        }
    )
    built = build_engine(config, lambda line: print(line, file=sys.stderr))
    published: queue.SimpleQueue[StepOutputs] = queue.SimpleQueue()
    loop = EngineLoop(built.engine, published.put)
    loop.start()
    submitted = 0

    def generate(prompts: list[list[int]], new_tokens: int, batch: int) -> list[list[int]]:
        nonlocal submitted
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, seed=0)
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), batch):
            members = {}
            for prompt in prompts[first : first + batch]:
                members[str(submitted)] = len(outputs)
                outputs.append([])
                loop.submit(Submission(str(submitted), prompt, params))
                submitted += 1
            unfinished = len(members)
            while unfinished:
                step = published.get()
                if step.failures:
                    raise step.failures[0].error
                for sequence in step.sequences:
                    outputs[members[sequence.request_id]] += sequence.token_ids
                    unfinished -= sequence.finish_reason is not None
        return outputs

    return generate


if __name__ == "__main__":
    serve(start)
