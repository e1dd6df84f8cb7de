"""Makes Triton's interpreter quicker, by doing once what it does at every call."""

from __future__ import annotations

import sys
from typing import Any


def patch_language_once() -> None:
    """Leave Triton's language patched once the interpreter has done so, instead of at every call.

    A kernel's run patches some 300 names and takes them back; a function that a kernel calls patches them
    again (a fifth of the tests' time). Nothing in these processes compiles Triton, so they may stay patched.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, done = interpreter._patch_lang, {}

    def patch_unless_done(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in done:
            done[id(names)] = names
            patch(function)
        return interpreter._LangPatchScope()  # of no changes: nothing is taken back

    interpreter._patch_lang = patch_unless_done
