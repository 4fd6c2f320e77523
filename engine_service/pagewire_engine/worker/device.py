"""The device that a worker computes on."""

from __future__ import annotations

import threading

import torch

from pagewire.errors import FailedPreconditionError


def find_device(name: str) -> torch.device:
    """The device that the setting means.

    Raises:
        FailedPreconditionError: there is no CUDA device that can be used.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise FailedPreconditionError(
            "no CUDA device is usable here (torch.cuda.is_available() is False); use --device cpu, "
            "or install a CUDA build of torch",
            field="device",
        )
    return torch.device("cuda", torch.cuda.current_device())


def wake_device(name: str) -> None:
    """Lets a thread make a CUDA device's context and load its matrix products: about a second of
    waiting, mostly for the driver and the disk. Whoever uses the device meanwhile waits for it."""
    threading.Thread(target=_wake, args=(name,), name="wake-device", daemon=True).start()


def _wake(name: str) -> None:
    if name == "cpu" or not torch.cuda.is_available():
        return  # the worker says so, if that is an error
    try:
        square = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        torch.mm(square, square)
        torch.cuda.synchronize()
    except RuntimeError:
        pass  # and so it does of a device that can't be used
