"""The `pagewire` command: `serve`, `bench`, `protos`, `download-model`, `version`.

Commands import what they need when they run, so that `--help` and mistakes are told at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pagewire import __version__

_HELP = """\
usage: pagewire COMMAND [flags]

Serve large language models.

commands:
  serve [MODEL]      Start engine, frontend and chat page on this machine.
  bench [MODEL]      Measure latency and throughput, of a model or of a running server.
  protos --out DIR   Write the .proto files of the public and the engine API into DIR.
  download-model     Fetch the embedded model (SmolLM2-135M-Instruct) and print its path.
  version            Print the version.

`pagewire COMMAND --help` shows a command's flags. The parts also run alone, on one machine or many:
engine-service, pagewire-frontend, pagewire-ui.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; exits with status 2 for a mistake in it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    if command in ("", "-h", "--help", "help"):
        print(_HELP, end="")
        raise SystemExit(0 if command else 2)
    if command in ("version", "--version"):
        print(f"pagewire {__version__}")
        return
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve,
        "bench": _bench,
        "protos": _protos,
        "download-model": _download_model,
    }
    if command not in commands:
        from pagewire.settings import exit_with_error
        from pagewire.variables import nearest

        hint = nearest(command, [*commands, "version"])
        exit_with_error("pagewire", f"there is no command {command!r}{hint}")
    try:
        raise SystemExit(commands[command](arguments[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # as shells report a program that SIGINT ended


def _serve(arguments: list[str]) -> int:
    from pagewire.settings import parse_settings
    from pagewire_frontend.serve_settings import FLAG_GROUPS, ServeSettings

    settings = parse_settings(
        ServeSettings,
        arguments,
        prog="pagewire serve",
        description="Serves a model on this machine: an engine, a frontend with the OpenAI and "
        "gRPC APIs, and a chat page, under one supervisor.",
        positional=["model"],
        groups=FLAG_GROUPS,
    )
    from pagewire_frontend.serve import serve

    return serve(settings)


def _bench(arguments: list[str]) -> int:
    from pagewire.settings import parse_settings
    from pagewire_frontend.bench.settings import FLAG_GROUPS, BenchSettings

    settings = parse_settings(
        BenchSettings,
        arguments,
        prog="pagewire bench",
        description="Measures a seeded workload of random prompts: latency (time to first token, "
        "per output token, end to end) and throughput of prefill and decode. It loads a model, or "
        "targets a running server by --target.",
        positional=["model"],
        groups=FLAG_GROUPS,
    )
    from pagewire_frontend.bench.command import bench

    return bench(settings)


def _protos(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pagewire protos",
        description="Writes the .proto files out, for clients in any language.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="Folder for them.")
    from pagewire.settings import FAILURE, MISTAKE, exit_with_error
    from pagewire_frontend.proto_files import write_protos

    out = parser.parse_args(arguments).out
    try:
        written = write_protos(out)
    except OSError as error:
        no_folder = isinstance(error, NotADirectoryError | FileExistsError)
        message = f"--out: can't write to {out}: {error.strerror}"
        exit_with_error("pagewire protos", message, MISTAKE if no_folder else FAILURE)
    for path in written:
        print(path)
    return 0


def _download_model(arguments: list[str]) -> int:
    argparse.ArgumentParser(
        prog="pagewire download-model",
        description="Fetches the embedded model, SmolLM2-135M-Instruct (93 MB, Apache-2.0), into "
        "the cache ($PAGEWIRE_CACHE, else $XDG_CACHE_HOME/pagewire, else ~/.cache/pagewire) and "
        "prints its path.",
    ).parse_args(arguments)
    from pagewire.errors import PagewireError
    from pagewire_frontend.model_download import smollm2_path

    try:
        print(smollm2_path(lambda line: print(line, file=sys.stderr)))
    except PagewireError as error:
        print(f"pagewire download-model: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
