"""Which kernels a worker computes with, and the change to the C++ ones once they are built."""

from __future__ import annotations

import logging

import torch

from pagewire.errors import FailedPreconditionError
from pagewire_kernels.attention import (
    AttentionBackend,
    BackendUnavailableError,
    load_attention_backend,
)
from pagewire_kernels.background_build import BackgroundBuild, can_be_built
from pagewire_kernels.build import KernelBuildError
from pagewire_kernels.cpu import CpuAttention
from pagewire_kernels.dense import DenseBackend, load_dense_backend

logger = logging.getLogger(__name__)


class Kernels:
    """Attention and dense kernels of one device; on CPU torch's may stand in for C++ ones.

    Attributes:
        attention: the attention backend.
        dense: what goes with it.
    """

    def __init__(self, name: str, device: torch.device, head_dim: int) -> None:
        """Finds them. `auto` on a CPU without the C++ kernels begins to build them.

        Args:
            name: the setting attention_backend.
            device: where the model lives.
            head_dim: its heads' size.

        Raises:
            FailedPreconditionError: what was asked for by name can't run here.
        """
        self._device = device
        self._head_dim = head_dim
        self._build: BackgroundBuild | None = None
        try:
            self.attention: AttentionBackend = load_attention_backend(name, device, head_dim)
        except BackendUnavailableError as error:
            raise FailedPreconditionError(str(error), field="attention_backend") from error
        if name == "auto" and device.type == "cpu" and self.attention.name != "cpu":
            self._build_if_possible()
        self.dense: DenseBackend = load_dense_backend(self.attention.name, device)

    @property
    def launch_ahead(self) -> bool:
        """Whether a step can be launched without a wait for the device, and its decodes be a CUDA
        graph: torch's attention, the reference, reads lengths on the host and can't."""
        return self._device.type == "cuda" and self.attention.capturable

    def take_built(self) -> bool:
        """Changes to the C++ kernels if a build has ended well since; whether it did so.

        To be called between steps: weights must be packed anew, and caches stay as they are.
        """
        if self._build is None or not self._build.ended:
            return False
        build, self._build = self._build, None
        try:
            build.result()
            self.attention = load_attention_backend("cpu", self._device, self._head_dim)
        except (BackendUnavailableError, KernelBuildError) as error:
            logger.warning("the C++ kernels can't be used, plain torch goes on serving: %s", error)
            return False
        self.dense = load_dense_backend(self.attention.name, self._device)
        logger.info("the C++ kernels are built and serve from now on")
        return True

    def _build_if_possible(self) -> None:
        if self._head_dim % CpuAttention.head_dim_multiple == 0 and can_be_built():
            logger.warning(
                "the C++ kernels are not built on this machine yet: plain torch serves, slower, "
                "while they are built in the background (a minute, or some if it is busy)"
            )
            self._build = BackgroundBuild()
            return
        try:
            load_attention_backend("cpu", self._device, self._head_dim)
        except BackendUnavailableError as error:
            logger.warning("plain torch serves, several times slower: %s", error)
