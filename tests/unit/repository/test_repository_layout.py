"""What must hold of the repository itself: layout, imports, wheel, generated files, documents."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.unit.repository.flag_table import README, with_table

ROOT = Path(__file__).parents[3]
PACKAGES = {
    "pagewire": "protos",
    "pagewire_frontend": "frontend",
    "pagewire_engine": "engine_service",
    "pagewire_kernels": "kernels",
    "pagewire_ui": "ui",
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_no_top_folder_is_a_package() -> None:
    # A package called `kernels` would shadow the one that transformers looks for.
    assert not [folder for folder in PACKAGES.values() if (ROOT / folder / "__init__.py").exists()]


def test_the_packages_are_imported_from_their_folders() -> None:
    program = f"import {', '.join(PACKAGES)}\n" + "\n".join(
        f"print({name}.__file__)" for name in PACKAGES
    )
    result = run(sys.executable, "-P", "-c", program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [
        str(ROOT / folder / name / "__init__.py") for name, folder in PACKAGES.items()
    ]


def test_the_import_rules_hold() -> None:
    result = run(str(Path(sys.executable).parent / "lint-imports"), "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_the_engines_readme_names_every_module() -> None:
    """It is where people who want to learn begin."""
    readme = (ROOT / "engine_service" / "README.md").read_text()
    package = ROOT / "engine_service" / "pagewire_engine"
    modules = {path.name for path in package.rglob("*.py")} - {"__init__.py"}
    named = {Path(name).name for name in re.findall(r"`([\w/]+\.py)`", readme)}
    assert modules - named == set(), "say what they are for"
    assert named - modules == set(), "they are gone"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "pagewire_frontend.server",
            {"torch", "transformers", "gradio", "pagewire_engine", "opentelemetry.sdk"},
        ),
        ("pagewire_engine.service", {"opentelemetry.sdk"}),
        ("pagewire_frontend.serve", {"torch", "transformers", "gradio", "pagewire_engine"}),
        ("pagewire_frontend.frontend_cli", {"torch", "gradio", "grpc", "fastapi"}),
        ("pagewire_frontend.cli", {"torch", "gradio", "grpc", "pydantic"}),
        ("pagewire_engine.cli", {"torch", "grpc"}),
        ("pagewire_ui.chat_client", {"torch", "gradio", "pagewire_frontend"}),
    ],
)
def test_a_module_is_imported_without_what_is_heavy(module: str, heavy: set[str]) -> None:
    program = f"import sys, {module}\nprint(*sys.modules)"
    result = run(sys.executable, "-P", "-c", program)
    assert result.returncode == 0, result.stderr
    assert not heavy & set(result.stdout.split())


def test_the_generated_code_is_up_to_date() -> None:
    result = run(sys.executable, "protos/generate.py", "--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_wheel_holds_all_packages_and_nothing_else(tmp_path: Path) -> None:
    result = run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", str(tmp_path), ".",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES.keys()
    for name in PACKAGES:
        assert f"{name}/py.typed" in names
    assert "pagewire/v1/inference.proto" in names
    assert any(re.fullmatch(r"pagewire_kernels/csrc/.*\.cpp", name) for name in names)
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_every_command_of_the_distribution_exists() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, target in scripts.items():
        module, function = target.split(":")
        result = run(sys.executable, "-P", "-c", f"from {module} import {function}")
        assert result.returncode == 0, f"{name}: {result.stderr}"


def test_the_table_of_flags_in_the_readme_is_up_to_date() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == with_table(text), "run `make docs`"


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    documents += [ROOT / folder / "README.md" for folder in (*PACKAGES.values(), "deploy", "tests")]
    for document in documents:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if not link.startswith("http"):
                assert (document.parent / link).exists(), f"{document}: {link}"


def test_modules_that_the_folders_readmes_name_exist() -> None:
    for folder in PACKAGES.values():
        text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
            found = (ROOT / folder / name).exists() or any((ROOT / folder).rglob(name.rstrip("/")))
            assert found, f"{folder}/README.md: {name}"


def test_make_lists_its_targets() -> None:
    listed = run("make", "help").stdout
    for target in ("setup", "serve", "test", "lint", "protos", "bench", "clean"):
        assert re.search(rf"^  make {target} ", listed, re.MULTILINE)
