"""From the syntax of a regular expression to a term."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from palmette.grammar.codepoints import ANY
from palmette.grammar.regex.machine import (
    Context,
    Contexts,
    Machine,
    explored,
    machine_of,
    machine_term,
)
from palmette.grammar.regex.nodes import (
    Begin,
    Characters,
    Choice,
    End,
    LookAhead,
    LookBehind,
    Node,
    Repeat,
    Sequence,
    asserts,
    children,
    literal_of,
)
from palmette.grammar.spelling import Spelling
from palmette.grammar.terms import Term


def full_match(node: Node, spelling: Spelling) -> Term:
    """The texts that the expression matches as a whole."""
    if not asserts(node):
        return _plain(node, spelling)
    contexts = _few_contexts(node, spelling)
    if contexts is None:
        return machine_term(machine_of(node, spelling.store.spend), spelling)
    return _Asserting(node, contexts, spelling).full_match()


def search(node: Node, spelling: Spelling) -> Term:
    """The texts in which the expression matches somewhere."""
    store = spelling.store
    if not asserts(node):
        anything = store.repeat(spelling.one_of(ANY), 0, None)
        return store.sequence(anything, _plain(node, spelling), anything)
    contexts = _few_contexts(node, spelling)
    if contexts is None:
        anywhere = Repeat(Characters(ANY), 0, None)
        whole = Sequence((anywhere, node, anywhere))
        return machine_term(machine_of(whole, store.spend), spelling)
    return _Asserting(node, contexts, spelling).search()


def _plain(node: Node, spelling: Spelling) -> Term:
    """A node without assertions, on its own."""
    store = spelling.store
    if isinstance(node, Characters):
        return spelling.one_of(node.set)
    if isinstance(node, Sequence):
        return store.sequence(*_plain_items(node, spelling))
    if isinstance(node, Choice):
        literals = [literal_of(item) for item in node.items]
        others = [i for i, text in zip(node.items, literals, strict=True) if text is None]
        words = spelling.texts(text for text in literals if text is not None)
        return store.alternation((words, *(_plain(item, spelling) for item in others)))
    assert isinstance(node, Repeat)
    return store.repeat(_plain(node.item, spelling), node.low, node.high)


def _plain_items(node: Sequence, spelling: Spelling) -> Iterator[Term]:
    """The items of a sequence, with characters next to each other as one text."""
    run = ""
    for item in node.items:
        character = literal_of(item) if isinstance(item, Characters) else None
        if character is not None:
            run += character
            continue
        if run:
            yield spelling.texts([run])
            run = ""
        yield _plain(item, spelling)
    if run:
        yield spelling.texts([run])


_MAX_CONTEXTS = 64

# What follows a place, for each of the contexts in which that may be.
_After = dict[Context, Term]


class _Asserting:
    """An expression with assertions, but none inside a repetition.

    An assertion looks at what stands on both sides of it. Of what is before, only the context
    matters; what is after is known when translating from the end.
    """

    def __init__(self, node: Node, contexts: Contexts, spelling: Spelling) -> None:
        self._node = node
        self._spelling = spelling
        self._store = spelling.store
        self._contexts = contexts
        self._all = self._contexts.reachable()
        self._anything = self._store.repeat(spelling.one_of(ANY), 0, None)
        self._known_leads: dict[tuple[Context, frozenset[Context]], Term] = {}

    def full_match(self) -> Term:
        epsilon = self._store.epsilon
        return self._followed(self._node, dict.fromkeys(self._all, epsilon))[self._contexts.start]

    def search(self) -> Term:
        found = self._followed(self._node, dict.fromkeys(self._all, self._anything))
        return self._led(self._anything, found)[self._contexts.start]

    def _followed(self, node: Node, after: _After) -> _After:
        """The node and all that follows it."""
        store = self._store
        if isinstance(node, Characters):
            return self._one_followed(node, after)
        if not asserts(node):
            return self._led(_plain(node, self._spelling), after)
        if isinstance(node, Sequence):
            for item in reversed(node.items):
                after = self._followed(item, after)
            return after
        if isinstance(node, Choice):
            branches = [self._followed(item, after) for item in node.items]
            return self._each(lambda c: store.alternation(branch[c] for branch in branches))
        if isinstance(node, (Begin, LookBehind)):
            holds = self._contexts.holds
            return self._each(lambda c: after[c] if holds(node, c) else store.empty)
        if isinstance(node, End):
            return self._each(lambda c: store.epsilon if after[c].nullable else store.empty)
        if isinstance(node, LookAhead):
            ahead = self._followed(node.item, dict.fromkeys(self._all, self._anything))
            if node.is_negative:
                ahead = self._each(lambda c, seen=ahead: store.complement(seen[c]))  # type: ignore[misc]
            return self._each(lambda c: store.both(ahead[c], after[c]))
        assert isinstance(node, Repeat)
        if node.high == 0:
            return after
        once = self._followed(node.item, after)
        if node.low == 1:
            return once
        return self._each(lambda c: store.alternation((once[c], after[c])))

    def _each(self, term: Callable[[Context], Term]) -> _After:
        return {context: term(context) for context in self._all}

    def _one_followed(self, node: Characters, after: _After) -> _After:
        contexts, store = self._contexts, self._store
        if contexts.inside is not None:
            term = store.sequence(self._spelling.one_of(node.set), after[contexts.inside])
            return dict.fromkeys(self._all, term)
        classes = contexts.alphabet.classes_in(node.set)

        def follow(context: Context) -> Term:
            leading: dict[Term, list[int]] = {}
            for c in classes:
                leading.setdefault(after[contexts.after(context, c)], []).append(c)
            return store.alternation(
                store.sequence(self._spelling.one_of(contexts.alphabet.characters(each)), rest)
                for rest, each in leading.items()
            )

        return self._each(follow)

    def _led(self, term: Term, after: _After) -> _After:
        """A term without assertions, and what follows it in the contexts it leads to."""
        store = self._store
        groups: dict[Term, set[Context]] = {}
        for context, rest in after.items():
            groups.setdefault(rest, set()).add(context)
        if len(groups) == 1:
            return self._each(lambda c: store.sequence(term, after[c]))
        return self._each(
            lambda c: store.alternation(
                store.sequence(self._leading(term, c, frozenset(group)), rest)
                for rest, group in groups.items()
                if rest != store.empty
            )
        )

    def _leading(self, term: Term, context: Context, group: frozenset[Context]) -> Term:
        """What of the term leads from the context to one of the group."""
        store = self._store
        ends_here = context in group
        if term == store.epsilon:
            return term if ends_here else store.empty
        reached = self._contexts.reached(context)
        if reached <= group:
            if ends_here or not term.nullable:
                return term
            return store.both(term, store.complement(store.epsilon))
        if not reached & group:
            return store.epsilon if ends_here and term.nullable else store.empty
        key = (context, group)
        leads = self._known_leads.get(key)
        if leads is None:
            leads = self._known_leads[key] = machine_term(
                self._leads(context, group), self._spelling
            )
        return store.both(term, leads)

    def _leads(self, context: Context, group: frozenset[Context]) -> Machine:
        """The texts that lead from the context to one of the group."""
        contexts = self._contexts

        def after(here: Context, character_class: int) -> Context:
            self._store.spend()
            return contexts.after(here, character_class)

        return explored(context, contexts.alphabet, after, group.__contains__)


def _few_contexts(node: Node, spelling: Spelling) -> Contexts | None:
    """The contexts, if what follows a place can be told for each; None if an automaton is better.

    That is so where an assertion may be asked for more than once in a row.
    """
    if _repeats_assertions(node):
        return None
    contexts = Contexts(node, spelling.store.spend)
    return contexts if len(contexts.reachable()) <= _MAX_CONTEXTS else None


def _repeats_assertions(node: Node) -> bool:
    """Whether an assertion may be asked for more than once in a row."""
    if isinstance(node, Repeat) and (node.high is None or node.high > 1) and asserts(node):
        return True
    if isinstance(node, LookBehind):
        return False  # an automaton anyway
    return any(map(_repeats_assertions, children(node)))
