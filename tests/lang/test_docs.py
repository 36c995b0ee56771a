"""What `docs/language.md` and `docs/from-sglang.md` say is so."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import palmette as pm
from palmette.lang.options import RUN_OPTION_NAMES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "language.md"
TABLES = ROOT / "docs" / "from-sglang.md"


def test_the_programs_of_the_page_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 5
    # Through the dict, so that the real one, with torch, is not loaded to be put back.
    monkeypatch.setitem(vars(pm), "Engine", lambda name: pm.ScriptedBackend("ok"))
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        pm.set_default_backend(None)
    state = names["state"]
    assert isinstance(state, pm.State)
    assert state["note"] == ["ok", "ok"]
    assert capsys.readouterr().out.startswith("tokens 0 to ")


def test_every_test_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", PAGE.read_text()))
    assert named
    assert all((Path(__file__).parent / name).exists() for name in named)


# -- The tables of names known from SGLang -------------------------------------------------------

SAMPLING = [
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
]

# SGLang's front end, by the sections of the page; arguments in their order.
SGLANG: dict[str, list[str]] = {
    "Names": [
        "function",
        "gen",
        "gen_int",
        "gen_string",
        "select",
        "system",
        "user",
        "assistant",
        "system_begin",
        "system_end",
        "user_begin",
        "user_end",
        "assistant_begin",
        "assistant_end",
        "image",
        "video",
        "separate_reasoning",
        "token_length_normalized",
        "greedy_token_selection",
        "unconditional_likelihood_normalized",
        "set_default_backend",
        "flush_cache",
        "get_server_info",
        "global_config",
        "Engine",
        "Runtime",
        "RuntimeEndpoint",
        "OpenAI",
        "Anthropic",
        "LiteLLM",
        "VertexAI",
        "Crusoe",
        "ServerArgs",
        "__version__",
    ],
    "gen": [
        *("name", "max_tokens", "min_tokens"),
        *SAMPLING,
        *("dtype", "choices", "choices_method", "regex", "json_schema"),
    ],
    "gen_int and gen_string": ["name", "max_tokens", *SAMPLING],
    "select": ["name", "choices", "temperature", "choices_method"],
    "Choice rules": [
        "token_length_normalized",
        "greedy_token_selection",
        "unconditional_likelihood_normalized",
        "ChoicesSamplingMethod",
        "requires_unconditional_logprobs",
        "ChoicesDecision",
    ],
    "function": ["func", "num_api_spec_tokens"],
    "Methods of a function": [
        "run",
        "run_batch",
        "bind",
        "cache",
        "trace",
        "compile",
        "pin",
        "unpin",
        "__call__",
        "func",
        "arg_names",
        "arg_defaults",
        "bind_arguments",
        "pin_prefix_rid",
    ],
    "run": ["max_new_tokens", *SAMPLING, "stream", "backend", "use_thread"],
    "run_batch": ["batch_kwargs", "num_threads", "progress_bar", "generator_style"],
    "Roles": ["expr"],
    "State": [
        "__iadd__",
        "system",
        "user",
        "assistant",
        "var_scope",
        "fork",
        "copy",
        "text",
        "messages",
        "sync",
        "error",
        "text_iter",
        "text_async_iter",
        "get_var",
        "__getitem__",
        "set_var",
        "__setitem__",
        "get_meta_info",
        "__contains__",
        "ret_value",
        "__repr__",
        "stream_executor",
    ],
    "Branches": ["join", "__getitem__", "__setitem__", "__iadd__", "states", "src_state"],
    "Meta data": [
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "finish_reason",
        "output_token_logprobs",
        "output_top_logprobs",
        "input_token_logprobs",
        "input_top_logprobs",
        "e2e_latency",
        "id",
    ],
    "Arguments of backends": [
        "set_default_backend",
        "flush_cache",
        "get_server_info",
        "Engine",
        "Runtime",
        "RuntimeEndpoint",
        "OpenAI",
        "Anthropic",
        "LiteLLM",
        "VertexAI",
        "Crusoe",
        "Engine.generate",
        "Engine.async_generate",
        "Engine.shutdown",
        "BaseBackend",
        "get_chat_template",
        "register_chat_template",
        "ChatTemplate",
    ],
    "global_config": [
        "default_backend",
        "verbosity",
        "skip_special_tokens_in_output",
        "spaces_between_special_tokens_in_out",
        "enable_precache_with_tracing",
        "enable_parallel_encoding",
    ],
}


class Row:
    """A line of a table: names, what they are here, and tests."""

    def __init__(self, line: str) -> None:
        names, self.here, self.test = (cell.strip() for cell in line.strip().split(" | "))
        # The name itself, without arguments, attributes and so on.
        self.names = re.findall(r"`([\w.]+)", names.removeprefix("| "))
        self.test = self.test.removesuffix("|")

    @property
    def is_absent(self) -> bool:
        return self.here.startswith(("absent", "not yet"))


@cache
def rows() -> dict[str, list[Row]]:
    """The rows of each section."""
    found: dict[str, list[Row]] = {}
    for section in TABLES.read_text().split("\n## ")[1:]:
        title, *lines = section.splitlines()
        table = [line for line in lines if line.startswith("| `")]
        if table:
            found[title] = [Row(line) for line in table]
    return found


@cache
def named_tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    }


def test_the_tables_have_every_name_and_argument_once_and_no_other() -> None:
    listed = {
        title: [name for row in table for name in row.names] for title, table in rows().items()
    }
    assert set(listed) == set(SGLANG)
    for title, names in SGLANG.items():
        assert sorted(listed[title]) == sorted(names), title


def test_every_row_has_a_test_that_exists_unless_there_is_nothing_to_test() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLES.read_text())
    assert len(named) > 90
    missing = [f"{path}::{name}" for path, name in named if name not in named_tests(path)]
    assert missing == []
    for table in rows().values():
        for row in table:
            assert ("::test_" in row.test) != row.is_absent, row.names


def has(title: str, name: str) -> bool:
    """Whether there is such a name, or such an argument, here."""
    of_run = {*RUN_OPTION_NAMES, *inspect.signature(pm.Function.run).parameters}
    arguments = {
        "gen": pm.gen,
        "gen_int and gen_string": pm.gen_int,
        "select": pm.select,
        "function": pm.function,
        "run_batch": pm.Function.run_batch,
    }
    if title in arguments:
        return name in inspect.signature(arguments[title]).parameters
    if title == "run":
        return name in of_run
    owner: object = {
        "Choice rules": pm.ChoicesSamplingMethod,
        "Methods of a function": pm.function(lambda s: None),
        "State": pm.State,
        "Branches": pm.Branches,
        "global_config": pm.global_config,
    }.get(title, pm)
    return hasattr(owner, name) or (title == "Choice rules" and hasattr(pm, name))


def test_what_is_absent_is_said_to_be_and_nothing_else_is() -> None:
    for title, table in rows().items():
        if title in ("Roles", "Meta data"):
            continue  # the content by position, and keys: what they do is tested
        for row in table:
            for name in row.names:
                if "." not in name:
                    assert has(title, name) != row.is_absent, f"{name} of {title}"


@pytest.mark.parametrize(
    ("title", "function"),
    [("gen", pm.gen), ("gen_int and gen_string", pm.gen_int), ("select", pm.select)],
)
def test_arguments_come_in_the_order_they_have_there(title: str, function: object) -> None:
    names = list(inspect.signature(function).parameters)
    assert names[: len(SGLANG[title])] == SGLANG[title]
