"""The exceptions of the package: every message says what is wrong, what it got, what it wanted.

All derive from :class:`EntrenarError`, which carries the remedy as ``hint``. ``str(error)`` is the
message followed by the hint, so that a caller who prints it shows both. ``exit_code`` is what the
command line returns for an error of that kind: 1 the run failed, 2 usage, config or data,
3 environment (device, memory, missing package).
"""

from __future__ import annotations

__all__ = [
    "AdapterError",
    "AllocationFailedError",
    "AutogradError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "CudaNotAvailableError",
    "DTypeError",
    "DataError",
    "DeviceError",
    "EntrenarError",
    "KernelError",
    "LayoutError",
    "MissingExtraError",
    "NumericsError",
    "ShapeMismatchError",
    "StreamHazardError",
    "TransferFailedError",
    "UnsupportedModelError",
    "VramError",
    "VramFullError",
]


class EntrenarError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: What is wrong, what was found and what was wanted, in one sentence.
        hint: What to do about it; empty where the message already says so.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class ShapeMismatchError(EntrenarError, ValueError):
    """Array sizes that do not fit together."""

    exit_code = 2


class DTypeError(EntrenarError, TypeError):
    """An element type that the operation does not take."""

    exit_code = 2


class LayoutError(EntrenarError, ValueError):
    """Strides that the operation neither reads nor silently copies."""

    exit_code = 2


class DeviceError(EntrenarError, RuntimeError):
    """Storage, streams or kernels on a device that cannot do what was asked."""

    exit_code = 3


class CudaNotAvailableError(DeviceError):
    """A GPU was required and there is none."""


class AllocationFailedError(DeviceError):
    """The device has not enough memory."""


class TransferFailedError(DeviceError):
    """A copy between host and device failed."""


class KernelError(DeviceError):
    """A kernel could not be compiled or launched."""


class StreamHazardError(EntrenarError, RuntimeError):
    """Two launches touch one buffer and nothing orders them.

    Attributes:
        hazard: The pair, a ``autograd.hazards.Hazard``; None where it was raised without one.
    """

    hazard: object = None


class CaptureError(EntrenarError, RuntimeError):
    """A graph could not be captured or replayed."""


class AutogradError(EntrenarError, RuntimeError):
    """A tape was used in a way that has no defined gradient."""


class NumericsError(EntrenarError, ArithmeticError):
    """A value that must be finite or in range is not."""


class ConfigError(EntrenarError, ValueError):
    """A setting that is unknown, of the wrong type, or out of range."""

    exit_code = 2


class DataError(EntrenarError, ValueError):
    """A row of a data file that cannot be used; the message names file and line."""

    exit_code = 2


class CheckpointError(EntrenarError, ValueError):
    """A model or run folder that is missing, incomplete or damaged."""

    exit_code = 2


class UnsupportedModelError(CheckpointError):
    """A well-formed checkpoint of an architecture or option that is not implemented."""


class AdapterError(EntrenarError, ValueError):
    """A LoRA adapter that does not fit the model, or an adapter folder that is not one."""

    exit_code = 2


class VramError(EntrenarError, RuntimeError):
    """The memory budget shared between processes does not allow the request."""

    exit_code = 3


class VramFullError(VramError):
    """The memory asked for is taken now; it may be given back."""


class MissingExtraError(EntrenarError, ImportError):
    """An optional package is not installed.

    Args:
        feature: What needs the package, as the user would name it.
        package: The package to import.
        extra: The extra of entrenar that brings it.
    """

    exit_code = 3

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {package!r}, which is not installed",
            f"install it with: pip install 'entrenar[{extra}]'",
        )
        self.package = package
        self.extra = extra
