"""The eleven workloads of the SGLang paper (arXiv:2312.07104, section 6) for a small model.

The programs have the shapes that the paper describes; their texts are made up here from a seed.
"""

from __future__ import annotations

from benchmarks.programs.agents import generative_agents, react_traces
from benchmarks.programs.chats import chat_long, chat_short
from benchmarks.programs.documents import json_decoding, rag
from benchmarks.programs.questions import hellaswag, mmlu
from benchmarks.programs.thoughts import llm_judge, skeleton_of_thought, tree_of_thought
from benchmarks.programs.workload import SIZES, MakeWorkload, Size, Workload

WORKLOADS: dict[str, MakeWorkload] = {
    "mmlu": mmlu,
    "hellaswag": hellaswag,
    "react": react_traces,
    "agents": generative_agents,
    "tree-of-thought": tree_of_thought,
    "skeleton-of-thought": skeleton_of_thought,
    "judge": llm_judge,
    "json": json_decoding,
    "chat-short": chat_short,
    "chat-long": chat_long,
    "rag": rag,
}

__all__ = ["SIZES", "WORKLOADS", "MakeWorkload", "Size", "Workload"]
