"""Networks built without memory for their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def on_meta(make: Callable[[], ModuleT]) -> ModuleT:
    """Build a network on the ``meta`` device, in evaluation mode, without gradients.

    Its weights are not initialised: for random numbers without memory, torch would load its compiler, which
    takes more than a second and 150 MB.
    """
    with torch.device("meta"), _NoInit():
        module = make()
    return module.requires_grad_(False).eval()


class _NoInit(TorchFunctionMode):
    """Leaves out what ``torch.nn.init`` does."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)
