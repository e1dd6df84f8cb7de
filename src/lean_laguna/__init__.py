"""Laguna code models with speculation that never changes a single output bit.

``LLM`` loads a target and maybe a drafter and completes prompts; ``SamplingParams`` says how. Both are
imported when first used, so that ``import lean_laguna`` does not load torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers take it; typing itself is most of the time of this import
if TYPE_CHECKING:
    from typing import Any

    from lean_laguna.core.types import SamplingParams
    from lean_laguna.engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "LLM":
        from lean_laguna.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from lean_laguna.core.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'lean_laguna' has no attribute '{name}'")
