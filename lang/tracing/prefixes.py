"""The prefix tree of the prompts of a trace: which beginnings were shared, and what was computed.

The prompts are sorted as bytes, four for each id, so that neighbours share the most; the tree
follows from the lengths that neighbours have in common, as a suffix tree follows from its array.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from palmette.lang.tracing.model import MAX_NODE_TEXT, MAX_NODES, Prefixes, PrefixNode

# Prompts beyond so many tokens in all are left out, which is told: 64 MB.
_MAX_TOKENS = 1 << 24
# Tokens that are decoded for the text of a node.
_MAX_DECODED = 200


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """One request's prompt; `num_cached` of its tokens were cached, None if that is not known."""

    token_ids: array[int]
    num_cached: int | None
    start: float
    place: tuple[int, int, int]  # run, branch, event


@dataclass(slots=True, eq=False)
class _Node:
    """Tokens [parent.end, end) of `key`."""

    end: int  # in tokens
    key: bytes
    parent: _Node | None
    children: list[_Node] = field(default_factory=list)
    ending: list[AskedPrompt] = field(default_factory=list)
    uses: int = 0
    computed: int = 0
    first: tuple[float, tuple[int, int, int]] | None = None

    @property
    def begin(self) -> int:
        return 0 if self.parent is None else self.parent.end


def prefix_tree(
    by_backend: Sequence[Sequence[AskedPrompt]], decoders: Sequence[Callable[[list[int]], str]]
) -> Prefixes:
    """The tree of all prompts, the first of each backend together; `decoders` by backend."""
    roots, num_left, num_omitted = [], _MAX_TOKENS, 0
    for asked in by_backend:
        kept = []
        for prompt in asked:
            if len(prompt.token_ids) > num_left:
                num_omitted += 1
                continue
            num_left -= len(prompt.token_ids)
            kept.append(prompt)
        root = _tree_of(kept)
        _count(root)
        roots.append(root)
    return _listed(roots, decoders, num_omitted)


def _tree_of(asked: Sequence[AskedPrompt]) -> _Node:
    keyed = sorted(((_key(prompt.token_ids), prompt) for prompt in asked), key=lambda pair: pair[0])
    root = _Node(0, b"", None)
    path = [root]  # from the root to the end of the prompt before
    before = b""
    for key, prompt in keyed:
        end, shared = len(key) // 4, _num_common(before, key)
        last: _Node | None = None
        while path[-1].end > shared:
            last = path.pop()
        if last is not None and path[-1].end < shared:
            top = path[-1]
            middle = _Node(shared, key, top, [last])
            top.children[-1] = middle
            last.parent = middle
            path.append(middle)
        if path[-1].end < end:
            node = _Node(end, key, path[-1])
            path[-1].children.append(node)
            path.append(node)
        path[-1].ending.append(prompt)
        before = key
    return root


def _count(root: _Node) -> None:
    """Uses, tokens computed and who came first, for each node."""
    order: list[_Node] = []
    whole: dict[_Node, int] = {}  # requests that computed all of the node and of what is above
    stack = [(root, 0)]
    path: list[_Node] = []
    while stack:
        node, depth = stack.pop()
        del path[depth:]
        path.append(node)
        order.append(node)
        ends = [each.end for each in path] if node.ending else []
        for prompt in node.ending:
            node.uses += 1
            came = prompt.start, prompt.place
            node.first = came if node.first is None else min(node.first, came)
            if prompt.num_cached is None or prompt.num_cached >= node.end:
                continue
            # The first node with tokens that were computed, and all those behind it.
            index = bisect_right(ends, prompt.num_cached)
            partly = path[index]
            partly.computed += partly.end - prompt.num_cached
            whole[node] = whole.get(node, 0) + 1
            whole[partly] = whole.get(partly, 0) - 1
        stack += [(child, depth + 1) for child in reversed(node.children)]
    for node in reversed(order):
        num_whole = whole.get(node, 0)
        for child in node.children:
            num_whole += whole[child]
            node.uses += child.uses
            if child.first is not None:
                node.first = child.first if node.first is None else min(node.first, child.first)
        whole[node] = num_whole
        node.computed += num_whole * (node.end - node.begin)


def _listed(
    roots: Sequence[_Node], decoders: Sequence[Callable[[list[int]], str]], num_omitted: int
) -> Prefixes:
    nodes: list[PrefixNode] = []
    num_left_out = 0
    waiting: deque[tuple[_Node, int | None, int]] = deque(
        (child, None, backend) for backend, root in enumerate(roots) for child in root.children
    )
    while waiting:
        node, parent, backend = waiting.popleft()
        if len(nodes) >= MAX_NODES:
            num_left_out += 1
        else:
            nodes.append(_told(node, parent, backend, decoders[backend]))
        index = len(nodes) - 1
        waiting += [(child, index, backend) for child in node.children]
    return Prefixes(nodes=tuple(nodes), omitted_nodes=num_left_out, omitted_prompts=num_omitted)


def _told(
    node: _Node, parent: int | None, backend: int, decode: Callable[[list[int]], str]
) -> PrefixNode:
    num_tokens = node.end - node.begin
    first = array("I", node.key[4 * node.begin : 4 * min(node.end, node.begin + _MAX_DECODED)])
    if sys.byteorder == "little":
        first.byteswap()
    text = decode(first.tolist())
    assert node.first is not None
    return PrefixNode(
        start=node.begin,
        num_tokens=num_tokens,
        text=text[:MAX_NODE_TEXT],
        uses=node.uses,
        ends=len(node.ending),
        computed=node.computed,
        first=node.first[1],
        parent=parent,
        backend=backend if parent is None else None,
        cut=len(text) > MAX_NODE_TEXT or num_tokens > _MAX_DECODED,
    )


def _key(token_ids: array[int]) -> bytes:
    """Big-endian, so that the order of the bytes is that of the ids."""
    copied = array("I", token_ids)
    if sys.byteorder == "little":
        copied.byteswap()
    return copied.tobytes()


def _num_common(left: bytes, right: bytes) -> int:
    """How many ids both begin with: by halves, each compared as a whole."""
    low, high = 0, min(len(left), len(right)) // 4
    if left[: 4 * high] == right[: 4 * high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[4 * low : 4 * middle] == right[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle
    return low
