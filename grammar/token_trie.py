"""The byte trie of a vocabulary, laid out in arrays so that it can be walked level by level."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


class TokenTrie:
    """Every prefix of every token is a node; node 0 is the empty prefix.

    Nodes are numbered in breadth-first order, so the children of a node are the contiguous range
    `first_child[node] .. + num_children[node]`, ordered by byte. Tokens without bytes are nowhere.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        order = sorted(
            (i for i, token in enumerate(token_bytes) if token), key=token_bytes.__getitem__
        )
        lengths = np.fromiter((len(token_bytes[i]) for i in order), np.int64, len(order))
        text = np.frombuffer(b"".join(token_bytes[i] for i in order), np.uint8)
        starts = np.cumsum(lengths) - lengths
        token_ids = np.array(order, np.int64)

        levels_byte: list[NDArray[np.uint8]] = [np.zeros(1, np.uint8)]
        levels_parent: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        num_nodes = 1
        node = np.zeros(len(order), np.int64)  # where each token stands, in the end: ends
        active = np.arange(len(order))
        depth = 0
        while active.size:
            byte = text[starts[active] + depth]
            parent = node[active]
            is_new = np.ones(active.size, bool)
            is_new[1:] = (parent[1:] != parent[:-1]) | (byte[1:] != byte[:-1])
            node[active] = num_nodes + np.cumsum(is_new) - 1
            levels_byte.append(byte[is_new])
            levels_parent.append(parent[is_new])
            num_nodes += int(is_new.sum())
            depth += 1
            active = active[lengths[active] > depth]

        self.num_nodes = num_nodes
        self.max_token_bytes = depth
        self.byte = np.concatenate(levels_byte)  # [num_nodes], how the parent reaches the node
        parent = np.concatenate(levels_parent)
        self._parent: IntArray = parent.astype(np.int32)
        self.num_children: IntArray = np.bincount(parent[1:], minlength=num_nodes).astype(np.int32)
        self.first_child: IntArray = (1 + np.cumsum(self.num_children) - self.num_children).astype(
            np.int32
        )
        # tokens[first_token[n] : first_token[n + 1]] are the tokens that end at node n
        order_by_node = np.argsort(node, kind="stable")
        self.tokens: IntArray = token_ids[order_by_node].astype(np.int32)
        self.token_nodes: IntArray = node[order_by_node].astype(np.int32)  # beside `tokens`
        counts = np.bincount(node, minlength=num_nodes)
        self.first_token: IntArray = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        self.has_token = counts > 0  # [num_nodes]

    def path(self, node: int) -> bytes:
        """The prefix that the node stands for."""
        path = bytearray()
        while node:
            path.append(int(self.byte[node]))
            node = int(self._parent[node])
        return bytes(reversed(path))

    def child(self, node: int, byte: int) -> int | None:
        """The node that `byte` leads to from `node`."""
        first = int(self.first_child[node])
        count = int(self.num_children[node])
        at = first + int(np.searchsorted(self.byte[first : first + count], byte))
        return at if at < first + count and self.byte[at] == byte else None

    def find(self, prefix: bytes) -> int | None:
        """The node that stands for `prefix`, if any token begins with it."""
        node = 0
        for byte in prefix:
            child = self.child(node, byte)
            if child is None:
                return None
            node = child
        return node

    def expand(self, nodes: IntArray) -> tuple[IntArray, IntArray]:
        """All children of `nodes`, and for each the index into `nodes` of its parent."""
        counts = self.num_children[nodes]
        ends = np.cumsum(counts)
        total = int(ends[-1]) if ends.size else 0
        owner = np.repeat(np.arange(nodes.size, dtype=np.int32), counts)
        shift = self.first_child[nodes] - (ends - counts)
        return (np.arange(total, dtype=np.int32) + shift[owner]).astype(np.int32), owner

    def tokens_at(self, nodes: IntArray) -> IntArray:
        """The tokens that end at one of `nodes`."""
        nodes = nodes[self.has_token[nodes]]
        first = self.first_token[nodes]
        counts = self.first_token[nodes + 1] - first
        if counts.size and int(counts.max()) == 1:
            single: IntArray = self.tokens[first]
            return single
        ends = np.cumsum(counts)
        shift = np.repeat(first - (ends - counts), counts)
        several: IntArray = self.tokens[np.arange(shift.size, dtype=np.int32) + shift]
        return several
