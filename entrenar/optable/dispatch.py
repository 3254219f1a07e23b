"""Run a function of the table on the device its storage is on.

CUDA storage goes to the Triton launcher. CPU storage goes to NumPy, the fast form in
``entrenar.cpu`` where there is one, or, under ``ENTRENAR_BACKEND=triton|ptx``, to the launcher,
which interprets or emulates its kernels. NumPy sees float32 and float64 storage as it lies, without
a copy; 16-bit storage is up-cast to float32 and each result rounded once, to nearest even.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from entrenar import runtime
from entrenar.checks import check_same_dtype
from entrenar.errors import DeviceError
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.optable import storage
from entrenar.optable.row import Function
from entrenar.reference import nf4 as reference_nf4

__all__ = ["call", "numpy_function"]

_HALF = (torch.float16, torch.bfloat16)


def call(function: str, /, *args: Any, stream: Any = None, **kwargs: Any) -> Any:
    """Run ``function`` on the backend of its arguments' device.

    Args:
        function: A name in ``optable.FUNCTIONS``, such as ``"rms_norm_forward"``.
        *args: Its arguments; tensors are torch storage, quantised weights are ``NF4Weight``.
        stream: The stream to order a launch on; NumPy runs in order. One of ours first waits for
            what other streams last did to the storage the call touches, and is remembered there.
        **kwargs: Its keyword arguments.

    Returns:
        What the launcher returns: torch storage on the device of the arguments.

    Raises:
        DeviceError: The arguments lie on different devices.
    """
    touched = [t for value in (*args, *kwargs.values()) for t in _storages(value)]
    on_cpu = _device(touched) == "cpu" and runtime.backend() == "numpy"
    ours = storage.orders(stream)
    written = _written(function, args, kwargs) if ours else ()
    if ours:
        storage.before(touched, written, stream)
    if on_cpu:
        result = _call_numpy(function, args, kwargs, stream)
    else:
        result = _launcher(function)(*args, stream=stream, **kwargs)
    if ours:
        results = result if isinstance(result, tuple) else (result,)
        storage.after(written, [t for value in results for t in _storages(value)], stream)
    return result


def _written(
    function: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[torch.Tensor]:
    """Return the storage among a call's arguments that it writes."""
    places, asked = _places(function)
    if not places or (asked and not _given("inplace", asked, args, kwargs)):
        return ()
    return [t for name, at in places for t in _storages(_given(name, at, args, kwargs))]


@functools.cache
def _places(function: str) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return name and position of each argument a function writes, and the position of ``inplace``."""
    names = list(_signature(function).parameters)
    places = tuple((name, names.index(name)) for name in _row(function).mutates)
    return places, names.index("inplace") if "inplace" in names else 0


def _given(name: str, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[at] if at < len(args) else kwargs.get(name)


def _row(function: str) -> Function:
    from entrenar.optable.table import (
        FUNCTIONS,  # the table imports the rows, which import nothing here
    )

    return FUNCTIONS[function]


@functools.cache
def _launcher(function: str) -> Callable[..., Any]:
    module = importlib.import_module(f"entrenar.kernels.{_row(function).family}")
    return getattr(module, function)


@functools.cache
def numpy_function(function: str) -> Callable[..., Any]:
    """Return the NumPy form of a function: the fast one of ``entrenar.cpu`` or the reference."""
    family = _row(function).family
    if importlib.util.find_spec(f"entrenar.cpu.{family}") is not None:
        fast = getattr(importlib.import_module(f"entrenar.cpu.{family}"), function, None)
        if fast is not None:
            return fast
    return getattr(importlib.import_module(f"entrenar.reference.{family}"), function)


@functools.cache
def _signature(function: str) -> inspect.Signature:
    return inspect.signature(numpy_function(function))


def _storages(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    return value.tensors() if isinstance(value, NF4Weight) else ()


def _device(tensors: Sequence[torch.Tensor]) -> str:
    devices = {str(t.device) for t in tensors}
    if len(devices) > 1:
        raise DeviceError(
            f"arguments lie on {' and '.join(sorted(devices))}, wanted one device",
            "move them to the same device first",
        )
    return devices.pop() if devices else "cpu"


def _to_numpy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype in _HALF else value).numpy()
    if isinstance(value, NF4Weight):
        return reference_nf4.NF4Weight(**{k: _to_numpy(v) for k, v in value.fields().items()})
    return value


def _call_numpy(function: str, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Any) -> Any:
    row = _row(function)
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    alike = {n: given[n] for n in row.alike if isinstance(given.get(n), torch.Tensor)}
    if any(
        t.dtype in _HALF for t in alike.values()
    ):  # of other dtypes the function itself sees all
        check_same_dtype(function, **alike)
    views = {name: _to_numpy(value) for name, value in given.items()}
    result = numpy_function(function)(**views)
    for name in row.mutates:
        value = given.get(name)
        if isinstance(value, torch.Tensor) and value.dtype in _HALF:
            _store_half(value, views[name])
    if runtime.has_listeners():
        _announce(row, given, result, stream)
    return _to_torch(row, given, views, result)


def _store_half(value: torch.Tensor, computed: np.ndarray) -> None:
    """Round to 16-bit storage; an argument that only may be written stays untouched, version too."""
    rounded = torch.from_numpy(computed).to(value.dtype)
    if not np.array_equal(rounded.view(torch.int16).numpy(), value.view(torch.int16).numpy()):
        value.copy_(rounded)


def _announce(row: Function, given: dict[str, Any], result: Any, stream: Any) -> None:
    reads = [t for value in given.values() for t in _storages(value)]
    writes = [t for name in row.mutates for t in _storages(given.get(name))]
    results = result if isinstance(result, tuple) else (result,)
    runtime.announce(
        runtime.LaunchRecord(
            row.name,
            stream,
            tuple(reads),
            (*writes, *(r for r in results if isinstance(r, np.ndarray))),
            "numpy",
        )
    )


def _to_torch(row: Function, given: dict[str, Any], views: dict[str, Any], result: Any) -> Any:
    """Wrap results as torch storage of the dtype the row states, returning mutated storage itself."""
    if result is None:
        return None  # a function that only writes its arguments
    if isinstance(result, reference_nf4.NF4Weight):
        fields: dict[str, Any] = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in vars(result).items()
        }
        fields["dtype"] = given["w"].dtype
        return NF4Weight(**fields)
    results = result if isinstance(result, tuple) else (result,)
    wrapped = tuple(
        _wrap(value, rule, row, given, views)
        # trailing results may be absent: without a residual there is no residual sum
        for value, rule in zip(results, row.results[: len(results)], strict=True)
    )
    return wrapped if isinstance(result, tuple) else wrapped[0]


def _wrap(
    value: Any, rule: str, row: Function, given: dict[str, Any], views: dict[str, Any]
) -> Any:
    if value is None:
        return None
    for name in row.mutates:
        if value is views.get(name):
            return given[name]
    override = given.get(row.override) if row.override else None
    dtype = override if override is not None else _result_dtype(rule.strip("()"), given)
    tensor = torch.from_numpy(np.ascontiguousarray(value).reshape(np.shape(value)))
    if tensor.dtype == torch.float64 and dtype == torch.float32:
        return tensor  # float64 storage stays float64 throughout, for gradient checks
    return tensor if dtype is None else tensor.to(dtype)


def _result_dtype(rule: str, given: dict[str, Any]) -> torch.dtype | None:
    source = given.get(rule)
    if source is not None:
        return source.dtype
    return getattr(torch, rule)
