"""Generates the Python code beside the .proto files (`--check`: says whether it is up to date).

Run by `make protos` and `make lint`, with grpcio-tools <= 1.84.0, so that the code also runs under
the grpcio and protobuf that GPU images ship.
"""

from __future__ import annotations

import argparse
import importlib.resources
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent
_HAS_SERVICE = re.compile(r"^service \w+ \{", re.MULTILINE)


def generate(out: Path) -> None:
    """Writes `_pb2.py` and `_pb2.pyi` for each file, `_pb2_grpc.py` for those with services."""
    sources = sorted((ROOT / "pagewire" / "v1").glob("*.proto"))
    with_services = [source for source in sources if _HAS_SERVICE.search(source.read_text())]
    _run([f"--python_out={out}", f"--pyi_out={out}"], sources)
    _run([f"--grpc_python_out={out}"], with_services)


def _run(options: list[str], sources: list[Path]) -> None:
    standard = importlib.resources.files("grpc_tools") / "_proto"
    names = [str(source.relative_to(ROOT)) for source in sources]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{standard}", *options, *names]) != 0:
        raise SystemExit("protoc failed")


def main() -> int:
    """Command line; status 1 when `--check` finds files that differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        folder, fresh_folder = ROOT / "pagewire" / "v1", Path(scratch) / "pagewire" / "v1"
        fresh = {path.name: path.read_bytes() for path in fresh_folder.iterdir()}
    committed = {path.name: path.read_bytes() for path in folder.glob("*_pb2*.py*")}
    differing = sorted(
        name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name)
    )
    for name in differing:
        print(f"{name} does not match its .proto file: run `make protos`", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
