"""Which pages of the KV cache are whose, and which hold prefixes that later prompts may begin with."""

from collections.abc import Sequence
from itertools import islice

PAGE = 32
"""Positions of a sequence that lie together."""
SCRATCH = 0
"""The page that idle rows write to, and nobody reads."""

_Key = tuple[int, ...]
"""A page's place in the tree of prefixes: the number of the page before, then its own tokens. Compared as a whole:
prompts that are made to have equal hashes share nothing."""


class Joined:
    """Two sequences as one, of which parts are taken without putting all of it together."""

    def __init__(self, first: Sequence[int], second: Sequence[int]):
        self._first, self._second, self._split = first, second, len(first)

    def __getitem__(self, part: slice) -> Sequence[int]:
        start, stop = part.start - self._split, part.stop - self._split
        return self._second[start:stop] if start >= 0 else (*self._first[part], *self._second[: max(0, stop)])


def pages_for(tokens: int) -> int:
    """How many pages so many tokens lie in."""
    return -(-tokens // PAGE)


class PagePool:
    """Hands out pages, counts who uses each, and remembers full ones by their tokens until they are needed.

    What nobody uses is forgotten in the order of its last use, and of a sequence from its end.
    """

    def __init__(self, pages: int, most_idle: int | None = None):
        """`most_idle`: pages that are remembered though nobody uses them; all of them unless given."""
        self.size = pages - 1
        self.most_idle = self.size if most_idle is None else most_idle
        self._free = list(range(pages - 1, SCRATCH, -1))
        self._idle: dict[int, None] = {}
        """Remembered and not used, the longest unused first."""
        self._users = [0] * pages
        self._known: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        """By page."""
        self._number = [0] * pages
        """Of each page that has a key: no other page has had it."""
        self._numbers = 0

    @property
    def available(self) -> int:
        """Pages that can be had: free ones, and those that are only remembered."""
        return len(self._free) + len(self._idle)

    def match(self, tokens: Sequence[int] | Joined, most: int) -> list[int]:
        """The pages of the longest remembered beginning of `tokens`, of at most `most` of them."""
        pages, parent = [], 0
        for place in range(most // PAGE):
            page = self._known.get(_key(parent, tokens, place))
            if page is None:
                break
            pages.append(page)
            parent = self._number[page]
        return pages

    def idle(self, pages: Sequence[int]) -> int:
        """How many of them nobody uses: to share those makes them unavailable."""
        return sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """One more user of pages that `match` found."""
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] += 1

    def take(self, count: int) -> list[int]:
        """Pages for a new user, whatever they hold. The caller has seen that they are `available`."""
        if count > len(self._free):
            self._evict(count - len(self._free))
        left = len(self._free) - count
        taken, self._free[left:] = self._free[left:], ()
        for page in taken:
            self._users[page] = 1
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """One user fewer, of the pages of a sequence."""
        users, keys = self._users, self._keys
        for page in reversed(pages):
            users[page] -= 1
            if users[page]:
                continue
            if page in keys:
                self._idle[page] = None
            else:
                self._free.append(page)
        if len(self._idle) > self.most_idle:
            self._evict(len(self._idle) - self.most_idle)

    def remember(self, pages: Sequence[int], tokens: Sequence[int] | Joined, count: int) -> None:
        """The first pages of a sequence, as many as `count` of its tokens fill, hold what these tokens give."""
        most, first = min(count // PAGE, len(pages)), 0
        if most and pages[most - 1] in self._keys:  # then so are those before it
            return
        while first < most and pages[first] in self._keys:
            first += 1
        parent = self._number[pages[first - 1]] if first else 0
        for place in range(first, most):
            page, key = pages[place], _key(parent, tokens, place)
            if (known := self._known.get(key)) is not None:
                parent = self._number[known]
            elif page in self._keys:  # below one that has been forgotten: not found any more, and not again
                return
            else:
                self._numbers += 1
                self._number[page] = parent = self._numbers
                self._known[key], self._keys[page] = page, key

    def forget(self, pages: Sequence[int] | None = None) -> None:
        """Match these pages, or any, no more. Who uses them still does."""
        for page in list(self._keys) if pages is None else pages:
            if page in self._keys:
                del self._known[self._keys.pop(page)]
                if page in self._idle:
                    del self._idle[page]
                    self._free.append(page)

    def _evict(self, count: int) -> None:
        for page in list(islice(self._idle, count)):
            del self._idle[page], self._known[self._keys.pop(page)]
            self._free.append(page)


def _key(parent: int, tokens: Sequence[int] | Joined, place: int) -> _Key:
    return (parent, *tokens[place * PAGE : (place + 1) * PAGE])
