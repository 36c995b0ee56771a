"""Palmette: write and run structured-generation programs.

::

    import palmette as pm

    @pm.function
    def capital(s, country):
        s += pm.user(f"What is the capital of {country}?")
        s += pm.assistant(pm.gen("answer", max_tokens=16, stop="."))

    pm.set_default_backend(pm.Engine("smollm2-135m"))
    print(capital.run(country="France")["answer"])

Importing it loads neither torch nor any other large library; `Engine` is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from palmette.errors import (
    BackendNotSet,
    BatchInterrupted,
    ConstraintError,
    EngineError,
    InvalidOutput,
    InvalidRequest,
    ModelError,
    PalmetteError,
    PrimitiveFailed,
    ProgramCancelled,
    ProgramError,
    ProgramTimeout,
    RemoteError,
    RequestAborted,
    TokenBudgetExceeded,
    UnsupportedFeature,
    VariableNotSet,
)
from palmette.lang.backend import (
    flush_cache,
    get_default_backend,
    get_server_info,
    set_default_backend,
)
from palmette.lang.backends.scripted import ByteTokenizer, Reply, ScriptedBackend
from palmette.lang.branches import Branches, first_k, first_k_async
from palmette.lang.builders import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    greedy_token_selection,
    image,
    select,
    separate_reasoning,
    special,
    system,
    system_begin,
    system_end,
    token_length_normalized,
    unconditional_likelihood_normalized,
    user,
    user_begin,
    user_end,
    video,
)
from palmette.lang.choices import ChoicesDecision, ChoicesMethod, ChoicesSamplingMethod
from palmette.lang.function import Function, function
from palmette.lang.global_config import global_config
from palmette.lang.planning.outline import Outline
from palmette.lang.planning.plan import BatchPlan
from palmette.lang.state import State
from palmette.lang.tracing import Trace

if TYPE_CHECKING:
    from palmette.lang.backends.anthropic import Anthropic
    from palmette.lang.backends.endpoint import Endpoint, RuntimeEndpoint
    from palmette.lang.backends.litellm import LiteLLM
    from palmette.lang.backends.openai import OpenAI
    from palmette.lang.backends.runtime import Runtime
    from palmette.runtime.async_engine import AsyncEngine as Engine

__all__ = [
    "Anthropic",
    "BackendNotSet",
    "BatchInterrupted",
    "BatchPlan",
    "Branches",
    "ByteTokenizer",
    "ChoicesDecision",
    "ChoicesMethod",
    "ChoicesSamplingMethod",
    "ConstraintError",
    "Endpoint",
    "Engine",
    "EngineError",
    "Function",
    "InvalidOutput",
    "InvalidRequest",
    "LiteLLM",
    "ModelError",
    "OpenAI",
    "Outline",
    "PalmetteError",
    "PrimitiveFailed",
    "ProgramCancelled",
    "ProgramError",
    "ProgramTimeout",
    "RemoteError",
    "Reply",
    "RequestAborted",
    "Runtime",
    "RuntimeEndpoint",
    "ScriptedBackend",
    "State",
    "TokenBudgetExceeded",
    "Trace",
    "UnsupportedFeature",
    "VariableNotSet",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "first_k",
    "first_k_async",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_default_backend",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "special",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]


# What is loaded when it is first asked for.
_LARGE = {
    "Anthropic": ("palmette.lang.backends.anthropic", "Anthropic"),
    "Endpoint": ("palmette.lang.backends.endpoint", "Endpoint"),
    "Engine": ("palmette.runtime.async_engine", "AsyncEngine"),
    "LiteLLM": ("palmette.lang.backends.litellm", "LiteLLM"),
    "OpenAI": ("palmette.lang.backends.openai", "OpenAI"),
    "Runtime": ("palmette.lang.backends.runtime", "Runtime"),
    "RuntimeEndpoint": ("palmette.lang.backends.endpoint", "RuntimeEndpoint"),
}


def __getattr__(name: str) -> Any:
    """Load what is large when it is first asked for."""
    if name in _LARGE:
        module, own_name = _LARGE[name]
        globals()[name] = getattr(import_module(module), own_name)
        return globals()[name]
    if name == "__version__":
        from importlib.metadata import version

        return version("palmette")
    raise AttributeError(f"module 'palmette' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
