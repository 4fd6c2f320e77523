"""The files that make a model's tokenizer, as every frontend of this engine gets them.

A Hugging Face folder is passed on as it is. A GGUF file's metadata is turned into the same files,
and so are GPT-2's `vocab.json` and `merges.txt`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagewire.config import EngineConfig
from pagewire.errors import InvalidArgumentError
from pagewire_engine.gguf_metadata import read_gguf_metadata
from pagewire_engine.gguf_tokenizer import tokenizer_files_from_gguf
from pagewire_engine.gpt2_tokenizer import tokenizer_json_from_vocab_and_merges
from pagewire_engine.model_files import resolve_model

_PASSED_ON = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TEMPLATE_FOLDER = "additional_chat_templates"
_MOST_TEMPLATES = 64
_SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
_TEKKEN = "tekken.json"


def load_model_tokenizer(config: EngineConfig, folder: Path, gguf: Path | None) -> dict[str, bytes]:
    """The files of the tokenizer that the settings name, or else of the model's own; none where
    they ask for none.

    Args:
        config: the engine's settings.
        folder: the model's.
        gguf: its GGUF file, if its weights come from one.

    Raises:
        PagewireError: there is no such tokenizer.
    """
    if config.skip_tokenizer_init:
        return {}
    if config.tokenizer is not None:
        # A tokenizer's name is looked up as a model's is; only its files are read.
        own = config.model_copy(update={"model": config.tokenizer, "revision": None})
        files = resolve_model(own, weights=False)
        folder, gguf = files.path, files.gguf
    return load_tokenizer_files(folder, gguf, mode=config.tokenizer_mode)


def load_tokenizer_files(model_dir: Path, gguf: Path | None, *, mode: str) -> dict[str, bytes]:
    """Collects the tokenizer's files under Hugging Face's names.

    Args:
        model_dir: folder of the model, or of `--tokenizer`.
        gguf: the model's GGUF file, where it is one. Its metadata serves when the folder holds no
            tokenizer.json of its own.
        mode: "auto", or "fast" to take nothing but a tokenizer.json.

    Raises:
        InvalidArgumentError: nothing here makes a tokenizer; the message says what would.
    """
    files = read_tokenizer_folder(model_dir, lambda name: _read(model_dir / name))
    if "tokenizer.json" in files:
        return files
    if mode == "fast":
        raise InvalidArgumentError(
            "tokenizer",
            f"{model_dir} has no tokenizer.json, and --tokenizer-mode fast takes nothing else; "
            "use --tokenizer-mode auto, or name a folder that has one with --tokenizer",
        )
    if gguf is not None:
        converted = tokenizer_files_from_gguf(read_gguf_metadata(gguf), source=str(gguf))
        return converted | _only(files, "generation_config.json")
    vocab, merges = model_dir / "vocab.json", model_dir / "merges.txt"
    if vocab.is_file() and merges.is_file():
        files["tokenizer.json"] = tokenizer_json_from_vocab_and_merges(vocab, merges, files)
        return files
    raise InvalidArgumentError("tokenizer", _what_is_missing(model_dir))


def read_tokenizer_folder(folder: Path, read: Callable[[str], bytes | None]) -> dict[str, bytes]:
    """What a folder holds of a tokenizer's files.

    Args:
        folder: where they are.
        read: a file's content by its name within the folder; None where there is none.
    """
    names = [*_PASSED_ON]
    templates = sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja"))[:_MOST_TEMPLATES]
    names += [f"{_TEMPLATE_FOLDER}/{template.name}" for template in templates]
    contents = ((name, read(name)) for name in names)
    return {name: content for name, content in contents if content is not None}


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _only(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    return {name: files[name]} if name in files else {}


def _what_is_missing(folder: Path) -> str:
    slow = [name for name in (*_SLOW_FILES, _TEKKEN) if (folder / name).is_file()]
    if slow:
        return (
            f"{folder} has only {', '.join(slow)}, which needs converting once: "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained("
            f"{str(folder)!r}) writes a tokenizer.json; or name another folder with --tokenizer"
        )
    return (
        f"{folder} has no tokenizer.json; name a folder that has one with --tokenizer, or serve "
        "token ids only with --skip-tokenizer-init"
    )
