"""Support for training loops that are not autobatch's: the user's own, and those of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autobatch.core.lazy import imported

if TYPE_CHECKING:
    from autobatch.integrations import accelerate, lightning, transformers

__all__ = ["accelerate", "lightning", "transformers"]

if not TYPE_CHECKING:  # a type checker sees the imports above, and refuses other names

    def __getattr__(name: str) -> Any:
        """Import an adapter at first use (PEP 562): each of them imports torch."""
        if name in __all__:
            return imported(f"autobatch.integrations.{name}")
        raise AttributeError(f"module 'autobatch.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
