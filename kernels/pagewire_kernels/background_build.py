"""Builds the C++ kernels beside a running engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from pagewire_kernels.build import KernelBuildError, build, find_compiler, library_path

logger = logging.getLogger(__name__)


def can_be_built() -> bool:
    """Whether the library is missing here, and a compiler is not."""
    return not library_path().exists() and find_compiler() is not None


class BackgroundBuild:
    """One build on a thread of its own, which waits for a patient compiler and takes no cycles."""

    def __init__(self, builder: Callable[[], Path] = lambda: build(patiently=True)) -> None:
        """Starts at once.

        Args:
            builder: builds and returns the library's path, or raises KernelBuildError. It starts
                no threads of an executor: the interpreter's exit waits for those.
        """
        self._builder = builder
        self._outcome: Path | KernelBuildError | None = None
        # A daemon: an engine that ends does not wait for a compiler.
        self._thread = threading.Thread(target=self._run, name="kernel-build", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether `result` answers at once."""
        return self._outcome is not None

    def result(self) -> Path:
        """The library's path; waits for it.

        Raises:
            KernelBuildError: the build failed.
        """
        self._thread.join()
        if not isinstance(self._outcome, Path):
            raise self._outcome or KernelBuildError("the build ended without a result")
        return self._outcome

    def _run(self) -> None:
        try:
            self._outcome = self._builder()
        except KernelBuildError as error:
            self._outcome = error
        except Exception as error:
            logger.exception("the build of the C++ kernels failed")
            self._outcome = KernelBuildError(f"the build failed: {error!r}")
