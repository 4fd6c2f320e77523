"""What the registry of adapters reads, keeps and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    ResourceExhaustedError,
)
from pagewire_engine.adapters import files, loadable, registry, roster
from pagewire_engine.adapters.description import AdapterDescription, AdapterFolder
from pagewire_engine.adapters.loadable import LoadablePaths
from pagewire_engine.adapters.registry import AdapterRegistry
from tests.fakes.fake_adapters import load, write_fake_adapter
from tests.fakes.fake_executor import FakeExecutor

MODEL_FILES = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"model": 1}'}


class Workers(FakeExecutor):
    """They count what they read."""

    num_reads = 0

    def load_adapter(self, number: int, folder: AdapterFolder) -> AdapterDescription:
        self.num_reads += 1
        return super().load_adapter(number, folder)


@pytest.fixture
def workers() -> Workers:
    return Workers(64, 4, 1000)


@pytest.fixture
def adapters(workers: Workers) -> Iterator[AdapterRegistry]:
    adapters = AdapterRegistry(
        workers,
        served_model_name="base",
        max_cpu_loras=2,
        tokenizer_files=MODEL_FILES,
        vocab_size=1000,
    )
    yield adapters
    adapters.close()


def test_what_is_there_unchanged_is_not_read_again(
    adapters: AdapterRegistry, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SETTLED_S", -60.0)
    folder = write_fake_adapter(tmp_path / "a", "old")
    first = load(adapters, "a", folder)
    again = load(adapters, "a", folder, in_place=True, base_model_name="org/base")
    assert (again, again.parent, workers.num_reads) == (first, "org/base", 1)
    with pytest.raises(FailedPreconditionError, match="holds version"):
        load(adapters, "a", folder, in_place=True, version="0" * 64)
    write_fake_adapter(folder, "newer")
    assert load(adapters, "a", folder, in_place=True).version != first.version


def test_files_that_have_only_just_changed_are_read_again(
    adapters: AdapterRegistry, workers: Workers, tmp_path: Path
) -> None:
    """They may change once more within a tick of the clock."""
    folder = write_fake_adapter(tmp_path / "a")
    first = load(adapters, "a", folder)
    assert load(adapters, "a", folder, in_place=True) is first
    assert workers.num_reads == 2


def test_the_same_content_once_more_drives_no_other_out_of_memory(
    adapters: AdapterRegistry, workers: Workers, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        load(adapters, name, write_fake_adapter(tmp_path / name, name))
    assert load(adapters, "b", write_fake_adapter(tmp_path / "copy", "b"), in_place=True)
    assert workers.num_reads == 3
    assert adapters.num_evictions == 0
    assert len(workers.adapters) == 2


def test_no_more_adapters_than_there_may_be(
    adapters: AdapterRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "_MOST_ADAPTERS", 2)
    for name in ("a", "b"):
        load(adapters, name, write_fake_adapter(tmp_path / name, name))
    with pytest.raises(ResourceExhaustedError, match="unload one") as caught:
        load(adapters, "c", tmp_path / "a")
    assert caught.value.field == "name"
    load(adapters, "b", write_fake_adapter(tmp_path / "b", "new"), in_place=True)
    adapters.unload("a", ends_requests=True)
    load(adapters, "c", tmp_path / "a")


def test_tokenizer_files_are_bounded_and_those_of_the_model_are_free(
    adapters: AdapterRegistry, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_MOST_FILE_BYTES", 100)
    for name in ("a", "b"):
        folder = write_fake_adapter(tmp_path / name, name)
        (folder / "tokenizer.json").write_bytes(MODEL_FILES["tokenizer.json"])
        (folder / "chat_template.jinja").write_text(name * 60)
    first = load(adapters, "a", tmp_path / "a")
    assert first.files["tokenizer.json"] is MODEL_FILES["tokenizer.json"]
    with pytest.raises(ResourceExhaustedError, match="chat templates") as caught:
        load(adapters, "b", tmp_path / "b")
    assert caught.value.field == "path"
    assert len(workers.adapters) == 1, "what was refused takes no memory"
    (tmp_path / "b" / "chat_template.jinja").unlink()
    load(adapters, "b", tmp_path / "b")


def test_the_tokenizer_of_one_adapter_is_bounded(
    adapters: AdapterRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_TOKENIZER_BYTES", 100)
    folder = write_fake_adapter(tmp_path / "a")
    (folder / "additional_chat_templates").mkdir()
    for name in ("x", "y"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(name * 60)
    with pytest.raises(FailedPreconditionError, match=r"together, .*y\.jinja"):
        load(adapters, "a", folder)


def test_an_adapter_has_a_name_of_its_own(adapters: AdapterRegistry, tmp_path: Path) -> None:
    with pytest.raises(AlreadyExistsError, match="the served model's name"):
        load(adapters, "base", write_fake_adapter(tmp_path / "a"))


def test_the_revision_tells_of_each_change_and_of_nothing_else(
    adapters: AdapterRegistry, tmp_path: Path
) -> None:
    seen = [adapters.revision()]
    load(adapters, "a", write_fake_adapter(tmp_path / "a", "old"))
    seen.append(adapters.revision())
    hold = adapters.hold("a")
    adapters.want(hold.number)
    assert adapters.revision() == seen[-1]
    load(adapters, "a", write_fake_adapter(tmp_path / "a", "new"), in_place=True)
    seen.append(adapters.revision())
    adapters.release(hold.number)
    adapters.unload("a", ends_requests=False)
    seen.append(adapters.revision())
    assert len(set(seen)) == len(seen)


def test_folders_that_have_not_changed_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b/checkpoint"):
        write_fake_adapter(tmp_path / name)
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    read: list[str] = []
    scandir = loadable.os.scandir
    monkeypatch.setattr(loadable.os, "scandir", lambda path: read.append(path) or scandir(path))
    monkeypatch.setattr(loadable, "_SETTLED_NS", -60_000_000_000)
    paths = LoadablePaths(str(tmp_path))
    assert paths.paths() == ["a", "b/checkpoint"]
    num_read = len(read)
    assert paths.paths() == ["a", "b/checkpoint"]
    assert len(read) == num_read
    write_fake_adapter(tmp_path / "b" / "later")
    (tmp_path / "a" / "adapter_config.json").unlink()
    assert paths.paths() == ["b/checkpoint", "b/later"]
    assert len(read) < 2 * num_read


def test_a_folder_that_has_only_just_changed_is_read_again(tmp_path: Path) -> None:
    paths = LoadablePaths(str(tmp_path))
    for name in ("a", "b", "c"):  # within one tick of the file system's clock
        write_fake_adapter(tmp_path / name)
        assert paths.paths()[-1] == name
