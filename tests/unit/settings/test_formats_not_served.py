"""A parser that there is not is refused when a program starts, and the remedy named."""

from __future__ import annotations

import pytest

from pagewire.settings import parse_settings
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.serve_settings import ServeSettings


@pytest.mark.parametrize("settings", [FrontendConfig, ServeSettings])
@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
@pytest.mark.parametrize("name", ["harmony", "openai", "gpt_oss"])
def test_harmony(
    settings: type[FrontendConfig], flag: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_settings(settings, [flag, name], prog="program", description="", environ={})
    told = capsys.readouterr().err
    assert stopped.value.code == 2
    assert f"{flag}: pagewire does not take Harmony apart" in told
    assert "leave this at auto, or set none" in told
