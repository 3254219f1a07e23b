"""Run a function of the table on the device its storage is on.

CUDA storage goes to the Triton launcher. CPU storage goes to NumPy, the fast form in
``entrenar.cpu`` where there is one, or, under ``ENTRENAR_BACKEND=triton|ptx``, to the launcher,
which interprets or emulates its kernels. NumPy sees float32 and float64 storage as it lies, without
a copy; 16-bit storage is up-cast to float32 and each result rounded once, to nearest even.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch

from entrenar import runtime
from entrenar.checks import check_same_dtype
from entrenar.cpu.threads import one_blas_thread
from entrenar.errors import DeviceError, DTypeError, LayoutError
from entrenar.kernels.nf4_weight import NF4Weight
from entrenar.optable import storage
from entrenar.optable.row import Function
from entrenar.reference import nf4 as reference_nf4

__all__ = ["again", "call", "numpy_function", "recorded", "storages", "written"]

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
    recorder = _RECORDER.get()
    if recorder is not None:
        return recorder.call(function, args, kwargs, lambda: _call(function, args, kwargs, stream))
    return _call(function, args, kwargs, stream)


def _call(function: str, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Any) -> Any:
    touched = [t for value in (*args, *kwargs.values()) for t in storages(value)]
    on_cpu = _device(touched) == "cpu" and runtime.backend() == "numpy"
    ours = storage.orders(stream)
    writes = written(function, args, kwargs) if ours else ()
    if ours:
        storage.before(touched, writes, stream)
    if on_cpu:
        result = _call_numpy(function, args, kwargs, stream)
    else:
        result = _launcher(function)(*args, stream=stream, **kwargs)
    if ours:
        results = result if isinstance(result, tuple) else (result,)
        storage.after(writes, [t for value in results for t in storages(value)], stream)
    return result


def written(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
    """Return the storage among a call's arguments that it writes."""
    places, asked = _places(function)
    if not places or (asked and not _given("inplace", asked, args, kwargs)):
        return ()
    return [t for name, at in places for t in storages(_given(name, at, args, kwargs))]


@functools.cache
def _places(function: str) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return name and position of each argument a function writes, and the position of ``inplace``."""
    names = list(_signature(function).parameters)
    places = tuple((name, names.index(name)) for name in _row(function).mutates)
    return places, names.index("inplace") if "inplace" in names else 0


class Recorder(Protocol):
    """Takes the calls of a context in place of the backend, which ``run`` hands them on to."""

    def call(
        self,
        function: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """Return what the call returns."""


_RECORDER: ContextVar[Recorder | None] = ContextVar("entrenar_recorder", default=None)


@contextlib.contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Hand every call of this context to ``recorder`` inside the block; other threads go on as ever."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def again(
    function: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Callable[[], None]:
    """Return what repeats a call that was made over CPU storage, into the storage of its results.

    Args:
        function: Its name.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: What it returned.
    """
    results = result if isinstance(result, tuple) else (result,)
    touched = {t.data_ptr() for value in (*args, *kwargs.values()) for t in storages(value)}
    targets = [
        (place, t)
        for place, t in enumerate(results)
        if isinstance(t, torch.Tensor) and t.data_ptr() not in touched
    ]
    if runtime.backend() == "numpy":
        compute = _prepared(function, args, kwargs)
    else:
        compute = functools.partial(_launcher(function), *args, **kwargs)

    def repeat() -> None:
        made = compute()
        made = made if isinstance(made, tuple) else (made,)
        for place, target in targets:
            new = made[place]
            if isinstance(new, torch.Tensor) or target.dtype in _HALF:
                target.copy_(new if isinstance(new, torch.Tensor) else torch.from_numpy(new))
            else:
                np.copyto(target.numpy(), new)

    return repeat


def _prepared(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Return what computes a call with NumPy; storage NumPy sees as it lies is viewed once."""
    row, given = _row(function), _bind(function, args, kwargs)
    halves = any(t.dtype in _HALF for value in given.values() for t in storages(value))
    if halves:
        return lambda: _compute(row, given)[0]
    views = {name: _to_numpy(value) for name, value in given.items()}
    repeated = functools.partial(numpy_function(function), **views)

    def compute() -> Any:
        with one_blas_thread():
            return repeated()

    return compute


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


def storages(value: Any) -> Sequence[torch.Tensor]:
    """Return the torch storage that an argument or result of a call consists of."""
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
    given = _bind(function, args, kwargs)
    _check_kinds(function, given)
    alike = {n: given[n] for n in row.alike if isinstance(given.get(n), torch.Tensor)}
    # of other dtypes the function itself sees all
    if any(t.dtype in _HALF for t in alike.values()):
        wide = {n for n in row.or_float32 if n in alike and alike[n].dtype == torch.float32}
        check_same_dtype(function, **{n: t for n, t in alike.items() if n not in wide})
    _check_writable(row, given)
    result = _to_torch(row, given, *_compute(row, given))
    if runtime.has_listeners():
        results = result if isinstance(result, tuple) else (result,)
        reads = [t for value in given.values() for t in storages(value)]
        known = {t.data_ptr() for t in reads}
        for made in (t for value in results for t in storages(value)):
            if made.data_ptr() not in known:
                runtime.announce_allocation(made.nbytes)
        writes = {id(t): t for t in written(function, args, kwargs)}
        writes |= {id(t): t for value in results for t in storages(value)}
        runtime.announce(
            runtime.LaunchRecord(function, stream, tuple(reads), tuple(writes.values()), "numpy")
        )
    return result


def _check_kinds(function: str, given: dict[str, Any]) -> None:
    """Refuse what is no torch storage in a tensor's place; the launchers do the same."""
    for name, may_be_none in _tensor_arguments(function):
        value = given[name]
        if not isinstance(value, torch.Tensor) and not (value is None and may_be_none):
            got = "None" if value is None else f"a {type(value).__name__}"
            raise DTypeError(
                f"{function}: {name} is {got}, wanted a torch tensor",
                "torch.from_numpy(array) views an ndarray",
            )


@functools.cache
def _tensor_arguments(function: str) -> tuple[tuple[str, bool], ...]:
    """Return the name of each argument that is a tensor, and whether it may be None."""
    kinds = {"np.ndarray": False, "np.ndarray | None": True}
    return tuple(
        (name, kinds[parameter.annotation])
        for name, parameter in _signature(function).parameters.items()
        if parameter.annotation in kinds
    )


def _check_writable(row: Function, given: dict[str, Any]) -> None:
    """Refuse to write storage whose elements share memory, as an expanded row's do."""
    for name in row.mutates:
        value = given.get(name)
        if isinstance(value, torch.Tensor) and 0 in value.stride() and not value.is_contiguous():
            raise LayoutError(
                f"{row.name}: {name} of shape {tuple(value.shape)} has strides {value.stride()}, so "
                "that elements to be written share memory",
                f"pass {name}.contiguous()",
            )


def _compute(row: Function, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what NumPy computes, and the arrays it was given; storage it wrote is rounded back."""
    views = {name: _to_numpy(value) for name, value in given.items()}
    with one_blas_thread():  # the small products too: BLAS threads would spin long after them
        result = numpy_function(row.name)(**views)
    for name in row.mutates:
        value = given.get(name)
        if isinstance(value, torch.Tensor) and value.dtype in _HALF:
            _store_half(value, views[name])
    return result, views


def _bind(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return every argument by name, defaults included: ``Signature.bind`` takes as long as an op."""
    names, defaults = _parameters(function)
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    fits = len(given) == len(names) and len(args) <= len(names)
    if not fits or not kwargs.keys().isdisjoint(names[: len(args)]):
        _signature(function).bind(*args, **kwargs)  # says what is wrong
    return given


@functools.cache
def _parameters(function: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    parameters = _signature(function).parameters
    empty = inspect.Parameter.empty
    return tuple(parameters), {
        n: p.default for n, p in parameters.items() if p.default is not empty
    }


def _store_half(value: torch.Tensor, computed: np.ndarray) -> None:
    """Round to 16-bit storage; an argument that only may be written stays untouched, version too."""
    rounded = torch.from_numpy(computed).to(value.dtype)
    if not np.array_equal(rounded.view(torch.int16).numpy(), value.view(torch.int16).numpy()):
        value.copy_(rounded)


def _to_torch(row: Function, given: dict[str, Any], result: Any, views: dict[str, Any]) -> Any:
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
