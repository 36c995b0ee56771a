"""Models of the many providers that the package `litellm` speaks to, as chats."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from palmette.errors import UnsupportedFeature
from palmette.lang.backends.openai import OpenAI

# It would fetch a list of models and prices when it is imported; it brings one along.
_OWN_PRICES = ("LITELLM_LOCAL_MODEL_COST_MAP", "True")


class LiteLLM(OpenAI):
    """A backend for programs: `model_name` as LiteLLM names it, such as "mistral/mistral-small".

    What a provider does not take, LiteLLM refuses, and that is InvalidRequest; nothing is dropped.
    Prompts are messages. `top_logprobs` is for providers that have log-probabilities. `timeout` is
    in seconds, of one try. For the other options see `RemoteOptions`; what is in neither goes to
    ``litellm.acompletion`` with each request. Raises UnsupportedFeature for a `chat_template`.
    """

    package = "litellm"
    errors = "openai"  # of which its own are kinds

    def __init__(
        self,
        model_name: str,
        chat_template: None = None,
        api_key: str | None = None,
        organization: str | None = None,
        base_url: str | None = None,
        timeout: float | None = 600,
        max_retries: int = 3,
        default_headers: Mapping[str, str] | None = None,
        *,
        top_logprobs: int = 0,
        **options: Any,
    ) -> None:
        if chat_template is not None:
            raise UnsupportedFeature(
                "chat_template", "the provider writes messages out itself", param="chat_template"
            )
        super().__init__(
            model_name,
            base_url=base_url,
            api_key=api_key,
            top_logprobs=top_logprobs,
            timeout=timeout,
            max_retries=max_retries,
            organization=organization,
            extra_headers=None if default_headers is None else dict(default_headers),
            **options,
        )

    def __enter__(self) -> LiteLLM:
        return self

    def _new_client(self) -> Any:
        os.environ.setdefault(*_OWN_PRICES)
        package = self._client_package()
        package.suppress_debug_info = True  # it would print where to report errors
        given = {name: value for name, value in self._options.items() if value is not None}
        return _Client(package, {**given, "num_retries": 0})

    async def _begin(self, client: Any, parameters: dict[str, Any]) -> Any:
        return await client.create(parameters)

    @property
    def _name_of_limit(self) -> str:
        return "max_tokens"

    @property
    def _most_stops(self) -> int | None:
        return None  # as many as the provider takes


class _Client:
    """The package's function as a client, with what goes with every request."""

    def __init__(self, package: Any, options: Mapping[str, Any]) -> None:
        self._package = package
        self._options = options

    async def create(self, parameters: Mapping[str, Any]) -> Any:
        """The stream of chunks."""
        return await self._package.acompletion(**self._options, **parameters)

    async def close(self) -> None:
        """Its connections are the package's, which keeps them for all."""
