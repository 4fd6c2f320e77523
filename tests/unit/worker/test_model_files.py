"""Finding a model, and what its files say; every way this fails is told with its remedy."""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import EngineConfig
from pagewire.errors import InvalidArgumentError, PagewireError, UnavailableError
from pagewire_engine.model_files import (
    ModelDescription,
    ModelFiles,
    load_description,
    resolve_model,
    trained_context,
)
from pagewire_engine.models.errors import (
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from pagewire_engine.tokenizer_files import load_tokenizer_files
from tests.fakes.tiny_gguf import write_tiny_gguf
from tests.fakes.tiny_models import MAX_POSITIONS, VOCAB_SIZE, tiny_reference


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    copy = tmp_path / "spoiled"
    shutil.copytree(tiny_llama, copy)
    return copy


def _config(model: Path | str, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(model), **settings)


def _describe(model: Path | str, **settings: Any) -> ModelDescription:
    config = _config(model, **settings)
    return load_description(resolve_model(config), config)


def _edit(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(fields | changes))


def test_a_folder_is_described(folder: Path) -> None:
    described = _describe(folder)
    assert described.architecture == "LlamaForCausalLM"
    assert described.vocab_size == VOCAB_SIZE
    assert described.max_model_len == MAX_POSITIONS
    assert described.eos_token_ids == (257,)
    assert resolve_model(_config(folder)) == ModelFiles(folder, None, "spoiled")


def test_generation_config_gives_end_tokens_and_sampling_defaults(folder: Path) -> None:
    _edit(
        folder / "generation_config.json",
        eos_token_id=[257, 9, 99999],
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=None,
        repetition_penalty=1.1,
    )
    described = _describe(folder)
    assert described.eos_token_ids == (257, 9)
    defaults = described.default_sampling_params
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 0.95, 20)
    assert (defaults.min_p, defaults.repetition_penalty) == (0.0, 1.1)


def test_a_default_that_no_request_could_ask_for_is_left_out(folder: Path) -> None:
    _edit(folder / "generation_config.json", top_p=1.7, temperature=0.5)
    defaults = _describe(folder).default_sampling_params
    assert (defaults.top_p, defaults.temperature) == (1.0, 0.5)


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_gguf_is_described_from_its_own_metadata(tmp_path: Path, as_folder: bool) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, tiny_reference("qwen3-head-norms-tied-without-bias"))
    described = _describe(tmp_path if as_folder else file)
    assert described.architecture == "Qwen3ForCausalLM"
    assert described.eos_token_ids == (257,)
    assert described.max_model_len == MAX_POSITIONS
    assert described.hf_config.head_dim == 16
    assert described.hf_config.tie_word_embeddings


def test_several_ggufs_in_a_folder_have_to_be_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"a\.gguf, b\.gguf.*name the file"):
        _describe(tmp_path)


def test_a_folder_of_anything_else_is_told_from_a_model_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"holds no model.*config\.json"):
        _describe(tmp_path)


def test_safetensors_are_not_asked_of_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"leave out --load-format safetensors"):
        _describe(tmp_path, load_format="safetensors")


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "gguf", "dummy"])
def test_a_tokenizers_folder_needs_no_weights(folder: Path, load_format: str) -> None:
    _no_weights(folder)
    files = resolve_model(_config(folder, load_format=load_format))
    assert "tokenizer.json" in load_tokenizer_files(files.path, files.gguf, mode="auto")


def test_max_model_len_may_be_lowered_but_not_raised(folder: Path) -> None:
    assert _describe(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(InvalidArgumentError, match=r"max_model_len.*129.*128"):
        _describe(folder, max_model_len=129)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 2048),
    ],
)
def test_rope_scaling_stretches_the_context(rope: dict[str, Any], longest: int) -> None:
    class Config:
        max_position_embeddings = 2048
        rope_parameters = rope

    assert trained_context(Config()) == longest


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def _nonsense_config(folder: Path) -> None:
    _edit(folder / "config.json", hidden_size="wide")


def _other_architecture(folder: Path) -> None:
    _edit(folder / "config.json", architectures=["MambaForCausalLM"], model_type="mamba")


def _quantised(folder: Path) -> None:
    _edit(folder / "config.json", quantization_config={"quant_method": "awq"})


def _only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_no_config, ModelFileError, r"has no config\.json.*download"),
        (_broken_config, ModelFileError, r"config\.json can't be read.*download"),
        (_list_config, ModelFileError, r"config\.json does not hold"),
        (_nonsense_config, ModelFileError, r"config\.json does not make a LlamaForCausalLM"),
        (_other_architecture, UnsupportedModelError, "MambaForCausalLM.*supported are Llama.*GPT2"),
        (_quantised, UnsupportedModelError, r"awq.*unquantised"),
        (_only_pickle, ModelFileError, r"only pickle.*pytorch_model\.bin.*convert"),
        (_no_weights, ModelFileError, r"no weights.*dummy"),
    ],
)
def test_a_spoiled_folder_is_refused_with_a_remedy(
    folder: Path, spoil: Any, error: type[PagewireError], message: str
) -> None:
    spoil(folder)
    with pytest.raises(error, match=message):
        _describe(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"architectures": [5]},
        {"quantization_config": "awq"},
        {"num_hidden_layers": 2**62},
        {"head_dim": -1},
        {"max_position_embeddings": 0},
        {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
    ],
    ids=str,
)
def test_a_config_of_absurd_values_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    _edit(folder / "config.json", **changes)
    with pytest.raises((ModelFileError, UnsupportedModelError)):
        _describe(folder)


@pytest.mark.parametrize("ids", ["x", ["x"], [[1]], {}])
def test_absurd_end_tokens_are_refused(folder: Path, ids: Any) -> None:
    _edit(folder / "generation_config.json", eos_token_id=ids)
    with pytest.raises(ModelFileError):
        _describe(folder)


def test_json_nested_too_deep_is_refused(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(ModelFileError):
        _describe(folder)


def test_a_name_longer_than_any_path_is_unknown() -> None:
    with pytest.raises(ModelNotFoundError):
        resolve_model(EngineConfig(model="a" * 5000))


def test_dummy_weights_need_a_config_only(folder: Path) -> None:
    _no_weights(folder)
    assert _describe(folder, load_format="dummy").vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "a/b/c", "missing.gguf/x/y"])
def test_a_path_that_is_not_there_is_unknown(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no file or folder.*hub name"):
        resolve_model(_config(name))


def test_a_file_that_is_not_gguf_is_refused(folder: Path) -> None:
    with pytest.raises(ModelFileError, match=r"not a \.gguf file"):
        resolve_model(_config(folder / "model.safetensors"))


def test_bytes_that_are_not_gguf_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "fake.gguf"
    file.write_bytes(b"\x00" * 100)
    with pytest.raises(InvalidArgumentError, match="not a readable GGUF"):
        _describe(file)


def test_code_of_a_model_is_never_run(folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"trust_remote_code.*no code"):
        resolve_model(_config(folder, trust_remote_code=True))


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        ("RepositoryNotFoundError", ModelNotFoundError, r"no model 'org/name' at 'v2'.*HF_TOKEN"),
        ("RevisionNotFoundError", ModelNotFoundError, r"'v2'"),
        ("GatedRepoError", ModelNotFoundError, r"gated.*licence"),
        ("LocalEntryNotFoundError", UnavailableError, r"can't be reached.*local folder"),
    ],
)
def test_hub_troubles_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, raised: str, error: type[PagewireError], message: str
) -> None:
    import httpx
    import huggingface_hub

    kind = getattr(huggingface_hub.errors, raised)
    answer = httpx.Response(404, request=httpx.Request("GET", "http://hub"))
    failure = kind("no") if raised == "LocalEntryNotFoundError" else kind("no", response=answer)

    def download(*args: object, **kwargs: object) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(error, match=message):
        resolve_model(_config("org/name", revision="v2"))


def test_the_hub_is_asked_for_weights_and_tokenizer_but_never_pickle_or_code(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(name: str, **kwargs: Any) -> str:
        asked.update(kwargs, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = resolve_model(_config("org/name", revision="v2", download_dir="/somewhere"))
    assert files == ModelFiles(folder, None, "org/name")
    assert (asked["name"], asked["revision"], asked["cache_dir"]) == (
        "org/name",
        "v2",
        "/somewhere",
    )
    patterns = " ".join(asked["allow_patterns"])
    assert "safetensors" in patterns
    assert not any(word in patterns for word in (".bin", ".pt", ".py", "*.*"))


class FakeHub:
    """A hub whose repository holds only these files; `fetch` puts them into the folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str]) -> None:
        import huggingface_hub

        self.folder = folder
        self.names = names
        self.reachable = True
        monkeypatch.setattr(huggingface_hub, "list_repo_files", self._list)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._fetch)

    def _list(self, name: str, revision: str | None) -> list[str]:
        if not self.reachable:
            raise ConnectionError("offline")
        return [*self.names, "README.md"]

    def _fetch(self, name: str, allow_patterns: list[str], **_: object) -> str:
        for file in self.names if self.reachable else []:
            if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                self.folder.mkdir(exist_ok=True)
                (self.folder / file).write_bytes(b"GGUF")
        return str(self.folder)


@pytest.mark.parametrize("load_format", ["auto", "gguf"])
def test_the_only_gguf_of_a_hubs_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load_format: str
) -> None:
    hub = FakeHub(monkeypatch, tmp_path / "snapshot", ["one.gguf"])
    files = resolve_model(_config("org/name", load_format=load_format))
    assert files == ModelFiles(hub.folder, hub.folder / "one.gguf", "org/name")
    hub.reachable = False
    assert resolve_model(_config("org/name", load_format=load_format)) == files


@pytest.mark.parametrize("load_format", ["auto", "gguf"])
def test_of_a_hubs_several_ggufs_none_is_fetched_and_one_has_to_be_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load_format: str
) -> None:
    hub = FakeHub(monkeypatch, tmp_path / "snapshot", ["q4.gguf", "q8.gguf"])
    with pytest.raises(ModelFileError, match=r"2 GGUF files \(q4.gguf, q8.gguf\).*hf download"):
        resolve_model(_config("org/name", load_format=load_format))
    assert not hub.folder.exists()


def test_a_hubs_model_without_any_weights_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FakeHub(monkeypatch, tmp_path / "snapshot", [])
    with pytest.raises(ModelFileError, match="holds no model"):
        _describe("org/name")


def test_a_tokenizer_is_fetched_without_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ["tokenizer.json", "model.safetensors", "a.gguf", "b.gguf"]
    hub = FakeHub(monkeypatch, tmp_path / "snapshot", names)
    resolve_model(_config("org/name"), weights=False)
    assert [path.name for path in hub.folder.iterdir()] == ["tokenizer.json"]


def test_modelscope_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(InvalidArgumentError, match=r"model_source.*pip install"):
        resolve_model(_config("org/name", model_source="modelscope"))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("{folder}/Some-Model", "Some-Model"),
        ("{folder}/Some-Model/", "Some-Model"),
        ("{folder}/Some-Model/../Some-Model", "Some-Model"),
        ("{folder}/Some-Model/Some-Model-Q8_0.gguf", "Some-Model-Q8_0"),
        ("{folder}/Some-1.5-Model.gguf", "Some-1.5-Model"),
    ],
)
def test_a_model_is_called_by_the_last_part_of_its_path(
    tmp_path: Path, given: str, name: str
) -> None:
    (tmp_path / "Some-Model").mkdir()
    for file in ("Some-Model/Some-Model-Q8_0.gguf", "Some-1.5-Model.gguf"):
        (tmp_path / file).touch()
    files = resolve_model(EngineConfig(model=given.format(folder=tmp_path)))
    assert files.name == name
