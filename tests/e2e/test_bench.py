"""`pagewire bench` with a tiny model in its process, and against a running frontend."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from tests.fakes.fake_engine_client import MODEL, FakeEngineClient
from tests.fakes.frontend import running_frontend
from tests.fakes.tiny_models import write_tiny_model, write_tiny_tokenizer

WORKLOAD = [
    "--num-prompts=6",
    "--prompt-len=10-20",
    "--output-len=5",
    "--max-concurrency=4",
    "--warmup=1",
]


def command(*flags: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pagewire", "bench", *WORKLOAD, *flags]


def test_a_model_is_loaded_and_measured(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama-llama3-rope-tied")
    write_tiny_tokenizer(tmp_path)
    flags = [str(tmp_path), "--json", "--kv-cache-memory=4000000", "--served-model-name=tiny"]
    done = subprocess.run(command(*flags), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["model"], told["requests"], told["failed"]) == ("tiny", 6, 0)
    assert told["output_tokens"] == 30
    assert 60 <= told["prompt_tokens"] <= 120
    assert told["decode"]["tokens"] == 24
    assert told["prefill"]["tokens_per_s"] > 0
    assert told["decode"]["tokens_per_s"] > 0
    latency = told["latency_s"]
    assert latency["e2e"]["p99"] >= latency["ttft"]["p50"] > 0
    assert latency["prefill"]["p50"] > 0
    assert "Output" in done.stderr  # the progress bar


async def test_a_running_frontend_is_measured() -> None:
    client = FakeEngineClient(reply=lambda request, index: "x" * 30, delay_s=0.001)
    async with running_frontend(client) as server:
        done = await asyncio.create_subprocess_exec(
            *command(f"--target=127.0.0.1:{server.grpc_port}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(done.communicate(), 100)
    assert done.returncode == 0, err.decode()
    table = out.decode()
    assert f"{MODEL} (127.0.0.1:{server.grpc_port}): 6 requests in" in table
    assert "30 output tokens" in table
    assert len(client.requests) == 7
