"""`pagewire serve` itself, but that its engine is `engine_under_test`. Run as a program."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pagewire_frontend import cli, serve_plan

if __name__ == "__main__":
    module = serve_plan._module

    def module_under_test(name: str, flags: Sequence[str]) -> list[str]:
        is_engine = name == "pagewire_engine.cli"
        return module("tests.fakes.engine_under_test" if is_engine else name, flags)

    serve_plan._module = module_under_test
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
