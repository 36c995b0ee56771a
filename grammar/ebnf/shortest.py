"""The shortest text of every rule and node, and which of them have none."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from palmette.grammar.ebnf.nodes import (
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    Terminal,
    Words,
    inside_out,
)
from palmette.grammar.term_store import TermStore


class Shortest:
    """Shortest texts by Knuth's generalisation of Dijkstra's algorithm (1977): smallest first.

    `num_bytes` has every node that derives a text, `rule_bytes` every such rule, `best` the
    alternative of a choice that is as short as any. `order` lists the rules so that each comes
    after those that its shortest text needs.
    """

    def __init__(self, rules: dict[str, Node], store: TermStore) -> None:
        self.num_bytes: dict[Node, int] = {}
        self.rule_bytes: dict[str, int] = {}
        self.best: dict[Choice, Node] = {}
        self.order: list[str] = []
        self._store = store
        self._around: dict[Node, list[Node]] = {}  # once for each occurrence
        self._missing: dict[Node, int] = {}  # items of a sequence that are not decided
        self._names: dict[Node, list[str]] = {}  # of the rules that a node is the whole of
        self._references: dict[str, list[Node]] = {}
        self._queue: list[tuple[int, int, Node, Node | None]] = []
        self._serial = 0
        self._read(rules)
        self._decide()

    def is_nullable(self, node: Node) -> bool:
        """Whether the empty text is one of its texts."""
        return self.num_bytes.get(node) == 0

    def is_possible(self, node: Node) -> bool:
        """Whether there is any text."""
        return node in self.num_bytes

    def first_calls(self, root: Node) -> dict[str, None]:
        """The rules that a text of the node may begin with."""
        found: dict[str, None] = {}
        seen: set[Node] = set()
        pending = [root]
        while pending:
            node = pending.pop()
            if node in seen or not self.is_possible(node):
                continue
            seen.add(node)
            self._store.spend()
            if isinstance(node, Reference):
                found[node.name] = None
            elif isinstance(node, Sequence):
                pending.extend(self.first_items(node))
            elif isinstance(node, Choice):
                pending.extend(node.items)
            elif isinstance(node, Repeat) and node.high != 0:
                pending.append(node.item)
        return found

    def first_items(self, node: Sequence) -> Iterable[Node]:
        """The items before which there may be nothing."""
        for item in node.items:
            yield item
            if not self.is_nullable(item):
                return

    def _read(self, rules: dict[str, Node]) -> None:
        seen: set[Node] = set()
        for name, root in rules.items():
            self._names.setdefault(root, []).append(name)
            for node in inside_out(root, seen.__contains__):
                seen.add(node)
                self._store.spend()
                self._read_node(node)

    def _read_node(self, node: Node) -> None:
        if isinstance(node, Words):
            lengths = [len(text) for text in node.texts if self._store.can_spell(text)]
            if lengths:
                self._offer(min(lengths), node)
        elif isinstance(node, Terminal):
            if not self._store.is_empty(node.term):
                self._offer(self._store.min_bytes(node.term), node)
        elif isinstance(node, Reference):
            self._references.setdefault(node.name, []).append(node)
        elif isinstance(node, Repeat):
            self._around.setdefault(node.item, []).append(node)
            if node.low == 0:
                self._offer(0, node)
        else:
            for item in node.items:
                self._around.setdefault(item, []).append(node)
            if isinstance(node, Sequence):
                self._missing[node] = len(node.items)
                if not node.items:
                    self._offer(0, node)

    def _offer(self, num_bytes: int, node: Node, item: Node | None = None) -> None:
        self._serial += 1
        heappush(self._queue, (num_bytes, self._serial, node, item))

    def _decide(self) -> None:
        while self._queue:
            num_bytes, _, node, item = heappop(self._queue)
            if node in self.num_bytes:
                continue
            self._store.spend()
            self.num_bytes[node] = num_bytes
            if isinstance(node, Choice) and item is not None:
                self.best[node] = item
            for name in self._names.get(node, ()):
                self.rule_bytes[name] = num_bytes
                self.order.append(name)
                for reference in self._references.get(name, ()):
                    self._offer(num_bytes, reference)
            for around in self._around.get(node, ()):
                self._tell(around, node, num_bytes)

    def _tell(self, around: Node, item: Node, num_bytes: int) -> None:
        if isinstance(around, Choice):
            if around not in self.num_bytes:
                self._offer(num_bytes, around, item)
        elif isinstance(around, Repeat):
            self._offer(around.low * num_bytes, around)
        else:
            assert isinstance(around, Sequence)
            self._missing[around] -= 1
            if not self._missing[around]:
                self._offer(sum(self.num_bytes[each] for each in around.items), around)
