"""Nothing that is shipped turns bytes from elsewhere into code: no pickle in any guise, no eval, no
shell, no unsafe YAML, no code of a model's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ("protos", "frontend", "engine_service", "kernels", "ui", "deploy")
MODULES = {
    "pickle", "_pickle", "cPickle", "marshal", "shelve", "dbm", "dill", "cloudpickle", "jsonpickle",
    "joblib", "copyreg",
}  # fmt: skip
NAMES = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "tempfile.mktemp",
}
# Torch's own reader of pickles is safe only so; numpy's only without.
MUST = {"torch.load": ("weights_only", True)}
MUST_NOT = {"shell": True, "allow_pickle": True, "trust_remote_code": True}


def unsafe(source: str) -> Iterator[str]:
    """What is unsafe in a module, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported = {(node.module or "").split(".")[0]}
        else:
            imported = set()
        for name in imported & MODULES:
            yield f"{node.lineno}: imports {name}"
        if isinstance(node, ast.Call):
            for reason in unsafe_call(node):
                yield f"{node.lineno}: {reason}"


def unsafe_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    given = {
        keyword.arg: keyword.value.value
        for keyword in call.keywords
        if isinstance(keyword.value, ast.Constant)
    }
    if name in NAMES | CALLS:
        yield f"calls {name}"
    if name in MUST and given.get(MUST[name][0]) is not MUST[name][1]:
        yield f"calls {name} without {MUST[name][0]}={MUST[name][1]}"
    for argument, value in MUST_NOT.items():
        if given.get(argument) is value:
            yield f"calls {name} with {argument}={value}"


def test_no_module_is_unsafe() -> None:
    paths = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 200
    found = [
        f"{path.relative_to(ROOT)}:{reason}"
        for path in paths
        for reason in unsafe(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from multiprocessing import util; import marshal",
        "from shelve import open",
        "eval(text)",
        "exec(code)",
        "__import__(name)",
        "subprocess.run(command, shell=True)",
        "os.system(command)",
        "yaml.load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_each_kind_would_be_found(line: str) -> None:
    assert list(unsafe(line))


def test_what_is_safe_is_let_be() -> None:
    assert not list(unsafe("yaml.safe_load(t); re.compile(p); torch.load(p, weights_only=True)"))
