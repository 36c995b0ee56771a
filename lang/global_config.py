"""Settings that programs written for SGLang read and write."""

from __future__ import annotations

from typing import Any

from palmette.errors import UnsupportedFeature
from palmette.lang.backend import get_default_backend, set_default_backend
from palmette.protocol import TokenBackend

# What can only be as it is here, and why.
_FIXED: dict[str, tuple[Any, str]] = {
    "verbosity": (0, "nothing is printed"),
    "skip_special_tokens_in_output": (True, "a token that ends a generation is no part of it"),
    "spaces_between_special_tokens_in_out": (False, "text is what its tokens spell, and no more"),
    "enable_precache_with_tracing": (
        False,
        "a prefix is shared as soon as one program has computed it; cache() computes it ahead",
    ),
    "enable_parallel_encoding": (
        False,
        "what is appended by a join is computed behind what stands before it",
    ),
}


class GlobalConfig:
    """The default backend under the name that SGLang's programs use, and what is fixed here.

    Setting something fixed to another value raises UnsupportedFeature.
    """

    @property
    def default_backend(self) -> TokenBackend | None:
        """As `get_default_backend` and `set_default_backend`."""
        return get_default_backend()

    @default_backend.setter
    def default_backend(self, backend: TokenBackend | None) -> None:
        set_default_backend(backend)

    def __getattr__(self, name: str) -> Any:
        if name not in _FIXED:
            raise AttributeError(f"global_config has no {name!r}")
        return _FIXED[name][0]

    def __setattr__(self, name: str, value: object) -> None:
        if name == "default_backend":
            object.__setattr__(self, name, value)
        elif getattr(self, name) != value:
            raise UnsupportedFeature(f"{name}={value!r}", _FIXED[name][1], param=name)


global_config = GlobalConfig()
