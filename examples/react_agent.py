"""An agent with two tools: it thinks, acts, sees what came of it, and goes on until it can answer.

The loop is ordinary Python. The action is picked by `select`, so it is one that exists; its input
matches a pattern of that tool's own, so it is one the tool can take. The tools run in this process:
a calculator that evaluates arithmetic and nothing else, and a small table of prices.
"""

from __future__ import annotations

import argparse
import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import palmette as pm

QUESTIONS = ["How much are 4 honeys?", "How much is bread?"]
PRICES = {"apple": 3, "bread": 4, "cheese": 12, "honey": 9, "tea": 6}

MAX_STEPS = 5
OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


@dataclass(frozen=True)
class Tool:
    """What an action does, and what its input looks like."""

    input_pattern: str
    use: Callable[[str], str]


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or what is wrong with it."""
    try:
        value = _value(ast.parse(expression, mode="eval").body)
        return f"{expression} = {value:g}"
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError) as error:
        return f"{expression} cannot be calculated: {error}"


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers and + - * / are allowed")


TOOLS = {
    "price": Tool("|".join(PRICES), lambda name: f"one {name} costs {PRICES[name]}"),
    "calculate": Tool(r"[0-9]{1,4}( [-+*/] [0-9]{1,4}){1,3}", calculate),
}
FINISH = "finish"

SHOWN = """\
Question: How much are 7 teas?
Thought: I need the price of tea.
Action: price[tea]
Observation: one tea costs 6
Thought: They want 7, and one costs 6.
Action: calculate[7 * 6]
Observation: 7 * 6 = 42
Thought: I know the answer.
Action: finish[42]

Question: How much are 2 cheeses?
Thought: I need the price of cheese.
Action: price[cheese]
Observation: one cheese costs 12
Thought: They want 2, and one costs 12.
Action: calculate[2 * 12]
Observation: 2 * 12 = 24
Thought: I know the answer.
Action: finish[24]

"""


@pm.function
def agent(s: pm.State, question: str) -> str | None:
    """Return the answer, or None if there is none after so many steps."""
    s += SHOWN + f"Question: {question}\n"
    for _ in range(MAX_STEPS):
        s += "Thought:" + pm.gen("thought", max_tokens=24, stop="\n")
        s += "\nAction: " + pm.select("action", [*TOOLS, FINISH]) + "["
        if s["action"] == FINISH:
            s += pm.gen("answer", regex=r"[0-9]{1,6}\]", max_tokens=8)
            return str(s["answer"]).removesuffix("]")
        tool = TOOLS[s["action"]]
        # The bracket belongs to the pattern, so that the model can end the input.
        s += pm.gen("input", regex=rf"({tool.input_pattern})\]", max_tokens=16)
        s += f"\nObservation: {tool.use(s['input'].removesuffix(']'))}\n"
    return None


def run(backend: pm.Engine, question: str) -> pm.State:
    """Let the agent work on a question and print what it does as it does it."""
    state = agent.stream(question, backend=backend, temperature=0)
    skip = len(SHOWN)
    for piece in state.text_iter():
        print(piece[skip:], end="", flush=True)
        skip = max(0, skip - len(piece))
    print(f"\nAnswer: {state.ret_value or f'none after {MAX_STEPS} steps'}\n")
    return state


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "questions", nargs="*", default=QUESTIONS, help=f"about prices of {', '.join(PRICES)}"
    )
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    args = parser.parse_args(argv)
    try:
        with pm.Engine(args.model) as engine:
            for question in args.questions:
                run(engine, question)
    except (pm.PalmetteError, KeyboardInterrupt) as error:
        parser.exit(1, f"{parser.prog}: {str(error) or 'interrupted'}\n")


if __name__ == "__main__":
    main()
