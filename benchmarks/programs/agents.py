"""Agents: traces of what they did, played back with the model's part generated again."""

from __future__ import annotations

from collections.abc import Sequence

import palmette as pm
from benchmarks.programs.workload import Size, Words, Workload, pick


@pm.function
def react(
    s: pm.State, shots: str, question: str, steps: Sequence[tuple[str, str]], num_tokens: int
) -> None:
    """Thoughts are generated, actions and observations are those of the trace."""
    s += f"Answer by thinking, acting and observing.\n\n{shots}Question: {question}\n"
    for action, observation in steps:
        s += "Thought:" + pm.gen("thoughts", max_tokens=num_tokens, append=True)
        s += f"\nAction: {action}\nObservation: {observation}\n"
    s += "Answer:" + pm.gen("answer", max_tokens=num_tokens)


def react_traces(size: Size, seed: int) -> Workload:
    """One list of examples for all, and each agent's own history, longer with every step."""
    words = Words("react", seed)
    shots = ""
    for _ in range(pick(size, 2, 3, 6)):
        shots += f"Question: {_react_question(words)}\n"
        for action, observation in _react_steps(words, 2):
            shots += f"Thought: I should look.\nAction: {action}\nObservation: {observation}\n"
        shots += f"Answer: {words.place()}\n\n"
    return Workload(
        name="ReAct traces",
        shares="examples; an agent's history",
        program=react,
        arguments=[
            {
                "shots": shots,
                "question": _react_question(words),
                "steps": _react_steps(words, pick(size, 2, 2, 4)),
                "num_tokens": pick(size, 4, 4, 12),
            }
            for _ in range(pick(size, 10, 3, 24))
        ],
    )


def _react_question(words: Words) -> str:
    return f"Where did {words.name()} leave the {words.thing()}?"


def _react_steps(words: Words, count: int) -> list[tuple[str, str]]:
    return [(f"look {words.place()}", words.text(1)) for _ in range(count)]


TASKS = {
    "plan": "List what this person will do in the next hour.",
    "talk": "Write the next thing that this person says.",
    "rate": "Say how important this is to the person, from 1 to 10.",
    "react": "Decide whether the person goes on or stops, and why.",
}


@pm.function
def act(s: pm.State, task: str, person: str, memories: str, event: str, num_tokens: int) -> None:
    s += f"This is a simulation of a small town with many people in it. {TASKS[task]}\n"
    s += f"Person: {person}\nMemories: {memories}\nNow: {event}\n"
    s += "Result:" + pm.gen("result", max_tokens=num_tokens)


def generative_agents(size: Size, seed: int) -> Workload:
    """The calls of a town's simulation, in the order they were made: by moment, person and task."""
    words = Words("generative agents", seed)
    people = {
        name: (f"{name}. {words.text(2)}", words.text(pick(size, 2, 3, 8)))
        for name in words.names(pick(size, 4, 2, 6))
    }
    arguments = []
    for _ in range(pick(size, 3, 2, 5)):
        for person, memories in people.values():
            event = words.sentence()
            arguments += [
                {
                    "task": task,
                    "person": person,
                    "memories": memories,
                    "event": event,
                    "num_tokens": pick(size, 4, 4, 8),
                }
                for task in TASKS
            ]
    return Workload(
        name="Generative agents",
        shares="a task's instructions; a person",
        program=act,
        arguments=arguments,
        is_known=True,
    )
