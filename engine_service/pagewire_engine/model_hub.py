"""Models that are fetched from a hub by name."""

from __future__ import annotations

import errno
from pathlib import Path

from pagewire.config import EngineConfig
from pagewire.errors import InvalidArgumentError, UnavailableError
from pagewire_engine.errors import UnmetStartupError
from pagewire_engine.models.errors import ModelFileError, ModelNotFoundError

# Never *.bin, *.pt or *.py: pagewire reads no pickle and runs no code of a model.
_TOKENIZER_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
]
_HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", *_TOKENIZER_PATTERNS]
_GGUF_PATTERNS = ["*.gguf", "*.json"]
_MOST_NAMES = 8
# The disk is full, or this user has no more of it, or may not write there.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


def download_model(config: EngineConfig, *, weights: bool = True) -> Path:
    """Fetches what is not in the cache yet.

    Args:
        config: names the model and the hub.
        weights: False: only its tokenizer is wanted.

    Returns:
        The model's folder. It need not be there where the hub's model has no file of ours.

    Raises:
        ModelNotFoundError: the hub has no such model, or not for this user.
        ModelFileError: it holds several GGUF files, of which one is meant.
        UnavailableError: the hub can't be reached.
        InvalidArgumentError: modelscope is not installed.
    """
    if config.model_source == "modelscope":
        return _download_from_modelscope(config, _HUB_PATTERNS if weights else _TOKENIZER_PATTERNS)
    if not weights:
        return _download(config, _TOKENIZER_PATTERNS)
    if config.load_format == "gguf":
        return _download_gguf(config, _ggufs_on_hub(config))
    folder = _download(config, _HUB_PATTERNS)
    # A repository of GGUF files mostly holds one model many times over, so that they are fetched
    # only where there is nothing else, and none where one has to be chosen.
    if config.load_format == "auto" and not any(folder.glob("*.safetensors")):
        ggufs = _ggufs_on_hub(config)
        if ggufs:
            return _download_gguf(config, ggufs)
    return folder


def _download_gguf(config: EngineConfig, names: list[str]) -> Path:
    if len(names) > 1:
        listed = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        raise ModelFileError(
            f"the hub's {config.model!r} holds {len(names)} GGUF files ({listed}): choose one, "
            f"download it by `hf download {config.model} FILE`, and give the path that it prints",
            field="model",
        )
    return _download(config, _GGUF_PATTERNS)


def _ggufs_on_hub(config: EngineConfig) -> list[str]:
    """Names of the model's GGUF files; none where the hub can't be asked."""
    from huggingface_hub import list_repo_files

    try:
        names = list_repo_files(config.model, revision=config.revision)
    except Exception:
        # Of several libraries, by version. The download that follows serves the cache, or tells
        # what is wrong.
        return []
    return sorted(name for name in names if name.endswith(".gguf"))


def _download(config: EngineConfig, patterns: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    where = f"model {config.model!r}" + (f" at {config.revision!r}" if config.revision else "")
    try:
        return Path(
            snapshot_download(
                config.model,
                revision=config.revision,
                cache_dir=config.download_dir,
                allow_patterns=patterns,
            )
        )
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{where} is gated: accept its licence on the hub and set HF_TOKEN", field="model"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ModelNotFoundError(
            f"the hub has no {where} (or it is private: set HF_TOKEN); a local model is given by "
            "its folder",
            field="model",
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
            raise UnmetStartupError(
                f"{where} can't be kept on this disk ({error.strerror}): make room in the hub's "
                "cache (HF_HOME), or name another folder",
                field="download_dir",
            ) from error
        raise UnavailableError(
            f"{where} is not on this machine and the hub can't be reached "
            f"({type(error).__name__}); give a local folder, or check network and HF_ENDPOINT",
            field="model",
        ) from error


def _download_from_modelscope(config: EngineConfig, patterns: list[str]) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise InvalidArgumentError(
            "model_source", "modelscope is not installed: pip install 'pagewire[modelscope]'"
        ) from error
    try:
        return Path(
            snapshot_download(
                config.model,
                revision=config.revision,
                cache_dir=config.download_dir,
                allow_patterns=patterns,
            )
        )
    except Exception as error:
        # Its exceptions share no base class and change between versions.
        raise ModelNotFoundError(
            f"model {config.model!r} could not be had from ModelScope: {error}", field="model"
        ) from error
