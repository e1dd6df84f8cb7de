"""Makes Triton's interpreter quicker, by doing once what it does at every call."""

from __future__ import annotations

import sys
from typing import Any


def make_interpreter_quicker() -> None:
    """Apply what is here, if Triton has been imported and its interpreter is the one known here."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    patch_language_once(interpreter)
    remember_types(interpreter)


def patch_language_once(interpreter: Any) -> None:
    """Leave Triton's language patched once the interpreter has done so, instead of at every call.

    A kernel's run patches some 300 names and takes them back; a function that a kernel calls patches them
    again (a fifth of the tests' time). Nothing in these processes compiles Triton, so they may stay patched.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, done = interpreter._patch_lang, {}

    def patch_unless_done(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in done:
            done[id(names)] = names
            patch(function)
        return interpreter._LangPatchScope()  # of no changes: nothing is taken back

    interpreter._patch_lang = patch_unless_done


def remember_types(interpreter: Any) -> None:
    """Make what follows from a type and a shape once, instead of for every value (a quarter of the time)."""
    core = sys.modules["triton.language.core"]
    make_block, make_value, dtype_of = (
        core.block_type.__init__,
        core.tensor.__init__,
        interpreter._get_np_dtype,
    )
    blocks: dict[Any, dict[str, Any]] = {}
    values: dict[Any, tuple[Any, Any]] = {}
    dtypes: dict[Any, Any] = {}

    def plain(size: Any) -> Any:
        return size.value if isinstance(size, core.constexpr) else size

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (type(element_ty), element_ty.name, *map(plain, shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    def init_value(self: Any, handle: Any, of: Any) -> None:
        key = (type(of), of.name)
        if key not in values:
            make_value(self, handle, of)
            values[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, of, of.scalar
        self.shape, self.numel = values[key]

    def np_dtype(of: Any) -> Any:
        key = (type(of), of.name)
        if key not in dtypes:
            dtypes[key] = dtype_of(of)
        return dtypes[key]

    core.block_type.__init__, core.tensor.__init__ = init_block, init_value
    interpreter._get_np_dtype = np_dtype
