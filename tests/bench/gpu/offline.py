"""One model in a process of its own, through `pagewire.LLM`, over the workloads.

Usage: python -m tests.bench.gpu.offline MODEL cuda|cpu [--tests A B C F] [--rounds 3] [--quick]
[--in-flight 64] [--profile] [--setting name=value]

Prints a line of JSON for the start and one for each result. Every measurement asserts its
conditions: bf16 weights and KV, no prefix cache, and outputs of the lengths asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pagewire import LLM, SamplingParams
from pagewire.config import EngineConfig
from pagewire_frontend.engine_client.in_process import InProcessEngineClient
from pagewire_frontend.llm import RequestOutput
from tests.bench.gpu.lines import Line, answers, failure
from tests.bench.gpu.settings import engine_settings, parsed_settings
from tests.bench.gpu.workloads import MODELS, BenchModel, fixed, min_decode_bytes, mixed

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
_WARM_UP_TOKENS = 32
_QUICK_WARM_UP = 64


class Offline:
    """A loaded model that generates, and checks what came out."""

    def __init__(self, model: BenchModel, device: str, given: dict[str, str]) -> None:
        self.model = model
        self.config = EngineConfig.model_validate(
            engine_settings(model, device, given) | {"skip_tokenizer_init": True}
        )
        self.reports: list[str] = []
        self._client = InProcessEngineClient(self.config, self.reports.append)
        self.llm = LLM.from_client(self._client)
        self._check_conditions(given)

    def _check_conditions(self, given: dict[str, str]) -> None:
        config = self.config
        assert self._client.model_info.dtype == config.dtype
        assert given.get("dtype") or config.dtype == "bfloat16"
        assert given.get("kv_cache_dtype") or config.kv_cache_dtype == "auto"
        assert not config.enable_prefix_caching, "the prefix cache would spare the work"

    @property
    def num_steps(self) -> int:
        """Steps that the engine has taken."""
        return self._client.engine_loop.stats().step

    def description(self) -> Line:
        """What was loaded, and how long its start took as far as it tells."""
        info = self._client.model_info
        return {
            "test": "start",
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "reports": self.reports,
        }

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        sampling: dict[str, Any],
        in_flight: int | None = None,
    ) -> float:
        """Runs all prompts; the seconds it took.

        Args:
            prompts: token ids.
            lengths: tokens to produce for each.
            sampling: temperature and so on.
            in_flight: so many callers take one prompt each, again and again. None: one call with
                all prompts.
        """
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [
            SamplingParams(max_tokens=length, ignore_eos=True, **sampling) for length in lengths
        ]
        began = time.perf_counter()
        if in_flight is None:
            outputs = self.llm.generate(inputs, params, use_tqdm=False)
        else:
            outputs = self._one_by_one(inputs, params, in_flight)
        seconds = time.perf_counter() - began
        produced = [len(output.outputs[0].token_ids) for output in outputs]
        assert produced == list(lengths), "outputs have other lengths than asked for"
        cached = sum(output.num_cached_tokens for output in outputs)
        assert cached == 0, f"{cached} prompt tokens came from the prefix cache"
        return seconds

    def _one_by_one(
        self, inputs: list[dict[str, list[int]]], params: list[SamplingParams], callers: int
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput | None] = [None] * len(inputs)
        taken = iter(range(len(inputs)))
        lock = threading.Lock()

        def call() -> None:
            while True:
                with lock:
                    number = next(taken, None)
                if number is None:
                    return
                [outputs[number]] = self.llm.generate(
                    inputs[number], params[number], use_tqdm=False
                )

        threads = [threading.Thread(target=call) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(outputs), "a caller failed"
        return [output for output in outputs if output is not None]

    @contextmanager
    def counting(self) -> Iterator[Line]:
        """Fills in what the engine counted until the block's end, and the host's processor time."""
        before, cpu = self._client.engine_loop.stats(), time.process_time()
        counted: Line = {}
        yield counted
        after = self._client.engine_loop.stats()
        steps = max(after.step - before.step, 1)
        counted["steps"] = steps
        counted["preemptions"] = after.num_preemptions - before.num_preemptions
        counted["host_cpu_ms_per_step"] = round(1e3 * (time.process_time() - cpu) / steps, 3)


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often each workload runs; quick runs give a first idea, not figures to quote."""

    rounds: int
    quick: bool


def run_mixed(
    offline: Offline, test: str, sampling: dict[str, Any], runs: Runs, in_flight: int | None = None
) -> Iterator[Line]:
    """A and F, and A by so many callers."""
    prompts, lengths = mixed(offline.model.scale)
    warm_up = slice(_QUICK_WARM_UP if runs.quick else None)
    offline.generate(prompts[warm_up], lengths[warm_up], sampling, in_flight)
    with offline.counting() as counted:
        times = [
            offline.generate(prompts, lengths, sampling, in_flight) for _ in range(runs.rounds)
        ]
    seconds, prompt_tokens, output_tokens = statistics.median(times), _total(prompts), sum(lengths)
    yield {
        "test": test,
        "batch": in_flight,
        "out_tok_s": round(output_tokens / seconds, 1),
        "total_tok_s": round((output_tokens + prompt_tokens) / seconds, 1),
        "requests": len(prompts),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "runs_s": _rounded(times),
        **counted,
        **sampling,
    }


def run_decodes(offline: Offline, runs: Runs) -> Iterator[Line]:
    """B: the time of a step, from the time of all tokens less the time of the first."""
    scale = offline.model.scale
    new, length = scale.decode_tokens, scale.decode_prompt
    for batch in scale.decode_batches:
        prompts = fixed(scale, batch, length, 100 + batch)
        offline.generate(prompts, [min(new, _WARM_UP_TOKENS)] * batch, GREEDY)
        if not runs.quick:
            offline.generate(prompts, [new] * batch, GREEDY)
        with offline.counting() as counted:
            times = [offline.generate(prompts, [new] * batch, GREEDY) for _ in range(runs.rounds)]
        firsts = [offline.generate(prompts, [1] * batch, GREEDY) for _ in range(runs.rounds)]
        seconds, first = statistics.median(times), statistics.median(firsts)
        # As counted for the peers: at a context of 256 tokens.
        context = length + new // 2
        yield {
            "test": "B",
            "batch": batch,
            "out_tok_s": round(batch * new / seconds, 1),
            "ms_per_step": round(1e3 * (seconds - first) / (new - 1), 3),
            "first_token_ms": round(1e3 * first, 2),
            "min_GB_per_step": round(
                min_decode_bytes(offline.model.config(), batch, context) / 1e9, 3
            ),
            "runs_s": _rounded(times),
            "first_runs_s": _rounded(firsts),
            **counted,
        }


def run_prefills(offline: Offline, runs: Runs) -> Iterator[Line]:
    """C: prompts of which one token is produced each; other ones in every round."""
    scale = offline.model.scale
    for batch, length in scale.prefills[:1] if runs.quick else scale.prefills:
        times = []
        with offline.counting() as counted:
            for turn in range(runs.rounds + 1):
                prompts = fixed(scale, batch, length, 1000 + 10 * batch + turn)
                times.append(offline.generate(prompts, [1] * batch, GREEDY))
        seconds = statistics.median(times[1:])
        yield {
            "test": "C",
            "batch": batch,
            "prompt": length,
            "prefill_tok_s": round(batch * length / seconds, 1),
            "ms": round(1e3 * seconds, 2),
            "runs_s": _rounded(times[1:]),
            **counted,
        }


def workloads(
    offline: Offline, runs: Runs, in_flight: Sequence[int]
) -> dict[str, Callable[[], Iterator[Line]]]:
    """What can be run, by name; `A64` is A by 64 callers, to set a server of 64 clients against."""
    tests: dict[str, Callable[[], Iterator[Line]]] = {
        "A": lambda: run_mixed(offline, "A", GREEDY, runs),
        "B": lambda: run_decodes(offline, runs),
        "C": lambda: run_prefills(offline, runs),
        "F": lambda: run_mixed(offline, "F", SAMPLED, runs),
    }
    for callers in in_flight:
        tests[f"A{callers}"] = lambda n=callers: run_mixed(offline, f"A{n}", GREEDY, runs, n)  # type: ignore[misc]
    return tests


def _total(prompts: Sequence[Sequence[int]]) -> int:
    return sum(map(len, prompts))


def _rounded(times: Sequence[float]) -> list[float]:
    return [round(seconds, 4) for seconds in times]


def card_name(device: str) -> str:
    """The name of what the model runs on."""
    if device != "cuda":
        return "cpu"
    import torch

    return torch.cuda.get_device_name()


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.offline", description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--in-flight", nargs="*", type=int, default=[])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--setting", action="append", default=[])
    return parser.parse_args(arguments)


def results(argv: Sequence[str]) -> Iterator[Line]:
    """What was chosen, line by line. A test's failure leaves the others be: they are still worth
    their time."""
    arguments = parse_arguments(argv)
    given = parsed_settings(arguments.setting)
    offline = Offline(MODELS[arguments.model], arguments.device, given)
    yield offline.description() | {"card": card_name(arguments.device)}
    runs = Runs(arguments.rounds, arguments.quick)
    tests = workloads(offline, runs, arguments.in_flight)
    chosen = list(arguments.tests)
    if arguments.profile:
        from tests.bench.gpu.profiling import run_profile

        tests["profile"] = lambda: run_profile(offline)
        chosen.append("profile")
    for name in chosen:
        try:
            yield from tests[name]()
        except Exception as error:
            traceback.print_exc()
            yield failure(name, error)
    offline.llm.shutdown()


def main() -> None:
    tell = answers()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    for line in results(sys.argv[1:]):
        tell(line)


if __name__ == "__main__":
    main()
