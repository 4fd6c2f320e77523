"""The page on security names flags, limits and tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

from pagewire import sampling_params, structured_output
from pagewire.config import EngineConfig
from pagewire_engine import grammar_trial, service, servicer, session_table, token_stream
from pagewire_frontend import template_budget
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.engine_client import session
from pagewire_frontend.grpc_api import operations
from pagewire_frontend.openai_api import http_protocol
from pagewire_frontend.serve_settings import ServeSettings

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "deploy" / "SECURITY.md").read_text()


def test_every_flag_it_names_exists() -> None:
    fields = {
        name
        for model in (EngineConfig, FrontendConfig, ServeSettings)
        for name in model.model_fields
    }
    named = {flag.removeprefix("no-") for flag in re.findall(r"`--([a-z-]+)", PAGE)}
    assert len(named) > 25
    assert {flag.replace("-", "_") for flag in named} <= fields


def test_every_file_it_names_exists() -> None:
    named = re.findall(r"`(tests/[^`]+)`", PAGE)
    assert len(named) > 8
    assert all((ROOT / path).exists() for path in named)


def test_the_limits_it_tells_are_those_of_the_code() -> None:
    mib = 1 << 20
    assert FrontendConfig.model_fields["max_request_bytes"].default == 16 * mib
    assert 16 * mib == service.MAX_REQUEST_BYTES
    assert token_stream._MAX_FRONTEND_FRAME == 64 << 10
    assert 16 * mib == session._MAX_ENGINE_FRAME
    assert http_protocol.MAX_HEAD_BYTES == 64 << 10
    assert sampling_params.MAX_SEQUENCES == 128
    assert sampling_params.MAX_STOP_STRINGS == 16
    assert sampling_params.MAX_STOP_CHARACTERS == 1000
    assert sampling_params.MAX_STOP_TOKEN_IDS == 1024
    assert sampling_params.MAX_LOGIT_BIASES == 4096
    assert sampling_params.MAX_LOGPROBS == 20
    assert structured_output.MAX_CONSTRAINT_BYTES == 256 << 10
    assert servicer.MAX_COMPILE_WAITS == 64
    assert servicer.MAX_STATS_STREAMS == 8
    assert operations.MAX_WATCHERS == 4
    assert session_table.MAX_SESSIONS == 1024
    assert grammar_trial.MAX_SECONDS == 2
    assert 512 * mib == grammar_trial.MAX_BYTES
    assert template_budget.MAX_SECONDS == 2.0
    assert template_budget.MAX_CHARACTERS == 8_000_000
    assert template_budget.MAX_TOTAL_BYTES == 512_000_000
