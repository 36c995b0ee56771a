"""How much one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds that keep one client from taking the server down. What passes one is refused by name.

    The defaults are far above what programs send: 8 MiB of JSON are some two million tokens.
    `max_choices` counts `n` times the number of prompts; `max_requests` those in progress at once,
    above which clients are told to come back later. `max_prompt_logprobs` are those of one answer,
    the likeliest tokens at each place included: about 30 bytes of it each. Of more than
    `max_programs`, and of those not heard of for `program_seconds`, nothing is held between their
    requests.
    """

    max_body_bytes: int = 8 << 20
    body_seconds: float = 60.0  # between two parts of a body that comes in parts
    max_choices: int = 256
    max_requests: int = 1024
    max_prompt_logprobs: int = 1 << 20
    max_stop_strings: int = 64
    max_stop_characters: int = 4096
    max_logit_bias: int = 1024
    max_programs: int = 4096
    program_seconds: float = 600.0
