"""llama.cpp in a benchmark's child process, run by an interpreter that has llama-cpp-python.

Usage: PYTHON -m tests.bench.engine_llama_cpp MODEL_GGUF KIND FOLDER

KIND is what the weights are quantised to: F32, BF16, Q8_0, Q4_0, or `own` for the file as it is.
The copy is made from the file's weights, for speed alone, and kept in FOLDER.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from tests.bench.child import Generate, serve

_FILE_TYPES = {
    "F32": "ALL_F32",
    "BF16": "MOSTLY_BF16",
    "Q8_0": "MOSTLY_Q8_0",
    "Q4_0": "MOSTLY_Q4_0",
}
_BATCH_TOKENS = 2048
_SEQUENCE_TOKENS = 512  # the longest prompt and its output
_THREADS = 2


class LlamaCpp:
    """Greedy decoding of batches through llama.cpp's C interface."""

    def __init__(self, path: Path, library: Any) -> None:
        self._library = library
        self._model = library.llama_model_load_from_file(
            str(path).encode(), library.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp can't load {path}")
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch = library.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._context: Any = None
        self._num_sequences = 0

    def generate(self, prompts: list[list[int]], new_tokens: int, batch: int) -> list[list[int]]:
        """`batch` prompts at a time."""
        self._reserve(batch)
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), batch):
            outputs += self._generate_together(prompts[first : first + batch], new_tokens)
        return outputs

    def _reserve(self, num_sequences: int) -> None:
        if num_sequences == self._num_sequences:
            return
        if self._context:
            self._library.llama_free(self._context)
        params = self._library.llama_context_default_params()
        params.n_ctx = num_sequences * _SEQUENCE_TOKENS
        params.n_seq_max = num_sequences
        params.n_batch = _BATCH_TOKENS
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = _THREADS
        self._context = self._library.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp refuses a context of {num_sequences} sequences")
        self._num_sequences = num_sequences

    def _generate_together(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        memory = self._library.llama_get_memory(self._context)
        self._library.llama_memory_clear(memory, True)
        outputs: list[list[int]] = [[] for _ in prompts]
        for group in _packed([len(prompt) for prompt in prompts]):
            # (token, position, sequence, whether its logits are wanted)
            entries = [
                (token, position, i, position == len(prompts[i]) - 1)
                for i in group
                for position, token in enumerate(prompts[i])
            ]
            self._decode(entries, outputs)
        for step in range(new_tokens - 1):
            entries = [
                (outputs[i][-1], len(prompt) + step, i, True) for i, prompt in enumerate(prompts)
            ]
            self._decode(entries, outputs)
        return outputs

    def _decode(self, entries: list[tuple[int, int, int, bool]], outputs: list[list[int]]) -> None:
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(entries)
        for j, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[j], batch.pos[j] = token, position
            batch.n_seq_id[j], batch.seq_id[j][0] = 1, sequence
            batch.logits[j] = wanted
        status = self._library.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")
        for j, (_, _, sequence, wanted) in enumerate(entries):
            if wanted:
                logits = self._library.llama_get_logits_ith(self._context, j)
                row = np.ctypeslib.as_array(logits, shape=(self._vocab_size,))
                outputs[sequence].append(int(row.argmax()))


def _packed(lengths: list[int]) -> list[list[int]]:
    """Prompts in turn, as many together as one call takes."""
    groups: list[list[int]] = []
    room = 0
    for i, length in enumerate(lengths):
        if length > room:
            groups.append([])
            room = _BATCH_TOKENS
        groups[-1].append(i)
        room -= length
    return groups


def _quantised(source: Path, kind: str, folder: Path, library: Any) -> Path:
    if kind == "own":
        return source
    target = folder / f"{source.stem}-{kind}.gguf"
    if not target.exists():
        params = library.llama_model_quantize_default_params()
        params.allow_requantize = True
        params.ftype = getattr(library, f"LLAMA_FTYPE_{_FILE_TYPES[kind]}")
        params.nthread = _THREADS
        scratch = target.with_suffix(".part")
        status = library.llama_model_quantize(
            str(source).encode(), str(scratch).encode(), ctypes.byref(params)
        )
        if status:
            raise RuntimeError(f"llama.cpp can't quantise {source} to {kind}: {status}")
        scratch.replace(target)
    return target


def start() -> Generate:
    """Loads the model."""
    import llama_cpp

    source, kind, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    engine = LlamaCpp(_quantised(source, kind, folder, llama_cpp), llama_cpp)

    def generate(prompts: list[list[int]], new_tokens: int, batch: int) -> list[list[int]]:
        assert quiet  # llama.cpp calls it for as long as it runs
        return engine.generate(prompts, new_tokens, batch)

    return generate


if __name__ == "__main__":
    serve(start)
