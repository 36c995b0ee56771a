"""Command-line options made from the fields of the engine's configuration."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from palmette.runtime.config import CacheSection, ModelSection, SchedulerSection

if TYPE_CHECKING:
    from palmette.runtime.config import EngineOptions

# What each field is, in a few words. A test holds this equal to the fields there are.
HELP = {
    "dtype": "numbers to compute with; auto takes what is fast on this processor",
    "device": "where to compute",
    "kernels": "what computes: our own in C++ on a CPU, torch, or auto for the first that can",
    "max_context": "tokens of prompt and output together, if fewer than the model takes",
    "chat_template": "Jinja text, or a file with it, instead of the model's own",
    "num_threads": "threads to compute with",
    "page_size": "tokens in a page of the KV pool",
    "num_pages": "pages in the KV pool",
    "kv_memory": "memory for the KV pool, such as 512MiB; used if --num-pages is not given",
    "prefix_cache": "keep the keys and values of prefixes for later requests",
    "host_memory": "memory for pages that are evicted from the KV pool, such as 2GiB, from where "
    "they come back",
    "host_directory": "keep those in a file in this directory instead, mapped into memory",
    "max_batch_tokens": "tokens computed in one step",
    "max_step_seconds": "about how long a step that prefills may take while others decode; inf: as "
    "long as it takes",
    "max_running": "sequences in one step",
    "jump_forward": "append what a constraint forces without a step for each token",
    "jump_mode": "in which tokens: those that are drawn, or those the tokenizer would choose",
    "max_guesses": "tokens of a step that may be guesses at how constrained texts go on; 0: none",
    "policy": "who of those that wait comes next: depth-first over their prompts, longest cached "
    "prefix, or by arrival",
    "max_wait": "seconds that others may pass a waiting request",
    "max_think": "seconds that a program between two requests keeps its pages from others",
}

# Fields that are a number of bytes.
_BYTES = frozenset({"kv_memory", "host_memory"})

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True, slots=True)
class EngineOption:
    """A field of the engine's configuration."""

    name: str
    annotation: Any
    default: Any


def engine_options() -> list[EngineOption]:
    """Every field of every section."""
    return [
        EngineOption(field.name, hints[field.name], field.default)
        for section in (ModelSection, CacheSection, SchedulerSection)
        for hints in [get_type_hints(section)]
        for field in fields(section)
    ]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Give a command an option for each field of the engine's configuration."""
    group = parser.add_argument_group("engine options")
    for option in engine_options():
        flag = "--" + option.name.replace("_", "-")
        settings: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
        text = HELP[option.name]
        if option.default is not None:
            text += f" (default: {_shown(option)})"
        if option.annotation is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif get_origin(option.annotation) is Literal:
            settings["choices"] = get_args(option.annotation)
        else:
            settings["type"] = _reader(option)
            settings["metavar"] = _metavar(option)
        group.add_argument(flag, help=text, **settings)


def add_thaw_option(parser: argparse.ArgumentParser) -> None:
    """Give a command the option for frozen prefixes."""
    parser.add_argument(
        "--thaw",
        metavar="PATH",
        action="append",
        default=[],
        help="a file of `palmette freeze`, whose prefix is then cached from the beginning; may be "
        "given several times",
    )


def given_engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """The engine options that were given; the engine knows the others' defaults."""
    given: Any = {
        option.name: getattr(arguments, option.name)
        for option in engine_options()
        if hasattr(arguments, option.name)
    }
    options: EngineOptions = given
    return options


def size(text: str) -> int:
    """A number of bytes, written as 4096, 512MiB or 2GB; all units are powers of 1024."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 2GiB")
    return int(float(match[1]) * (1 << _UNITS[match[2]]))


def _reader(option: EngineOption) -> Callable[[str], Any]:
    if option.name in _BYTES:
        return size
    kinds = [kind for kind in get_args(option.annotation) if kind is not type(None)]
    reader: Callable[[str], Any] = kinds[0] if kinds else option.annotation
    return reader


def _metavar(option: EngineOption) -> str:
    if option.name in _BYTES:
        return "SIZE"
    if option.annotation is float:
        return "SECONDS"
    return "N" if _reader(option) is int else option.name.rpartition("_")[2].upper()


def _shown(option: EngineOption) -> str:
    """The default in words."""
    if option.annotation is bool:
        return "on" if option.default else "off"
    if option.name in _BYTES and not option.default:
        return "off"
    return str(option.default)
