"""Triton's interpreter, in half the time.

It replaces `triton.language` by functions of its own for the time of a launch, and once more for
every call of a device function inside: each time all members of its modules are looked through,
which takes longer than what a kernel computes. Here what is replaced already is left so.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_replace = interpreter._patch_lang
_launch: Any = interpreter._LangPatchScope()
"""What the last launch replaced; empty when it is over."""
_modules: set[str] = set()
"""Where it did so."""


def quicken() -> None:
    """For all kernels of this process; may be called more than once."""
    interpreter._patch_lang = _replace_once
    interpreter._patch_builtin = _replace_builtins


@contextmanager
def unchecked() -> Iterator[None]:
    """Without looking whether sums of integers overflow, which kernels of others need not prove."""
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter.interpreter_builder.options = options


def _replace_once(function: Any) -> Any:
    """As Triton's `_patch_lang`."""
    global _launch
    known = {
        each.__name__ for each in function.__globals__.values() if each is tl or each is tl.core
    }
    if not _launch._changes:
        _modules.clear()
        _modules.update(known)
        _launch = _replace(function)
        return _launch
    if known <= _modules:
        return interpreter._LangPatchScope()
    _modules.update(known)
    return _replace(function)


def _replace_builtins(module: Any, builder: Any, scope: Any) -> None:
    """As Triton's `_patch_builtin`."""
    for name in _names_of_builtins(module):
        member = getattr(module, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(module, name, member, builder, scope)


@cache
def _names_of_builtins(module: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]
