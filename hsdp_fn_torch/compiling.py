"""What ``torch.compile`` makes of this package: nothing. It compiles the models' code between our calls.

Compiled callers break their graph where a sharded module is called, and our own functions, which run between the
graphs, are passed over. Marks, not wrappers, so that nothing is paid without a compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])


def not_traced(function: F) -> F:
    """A compiler that meets a call of ``function`` breaks its graph instead of looking inside."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "collectives and autograd nodes of sharded modules stay eager"  # type: ignore[attr-defined]
    return function


def pass_over(package: str) -> None:
    """Don't compile the frames of any function defined in a package's modules that are loaded; what they call is
    compiled as if they weren't there."""
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for code in _codes(module):
                set_code_exec_strategy(code, strategy)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        owners = [value, *vars(value).values()] if isinstance(value, type) else [value]
        for owner in owners:
            for function in (owner, getattr(owner, "fget", None), getattr(owner, "__func__", None)):
                plain = getattr(function, "__wrapped__", function)
                if isinstance(plain, FunctionType) and plain.__module__ == module.__name__:
                    yield from _nested(plain.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _nested(const)
