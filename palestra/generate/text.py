"""The text of a generation as it grows, and the stop strings in it."""

from collections.abc import Sequence

from palestra.data.tokenizers import Detokenizer, Tokenizer


class StopStrings:
    """Looks for strings in text that comes in pieces, and keeps back what might become one."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.found: str | None = None
        self._kept = ""

    def push(self, text: str, *, ignore: bool = False) -> str:
        """The text that is certain to lie before any stop string. Sets `found` once one ends in `text`.

        The first one to begin counts, of several the longest. With `ignore` none does.
        """
        seen, before = self._kept + text, len(self._kept)
        matches = []
        for stop in () if ignore else self.stops:
            # Not one that lay in the kept text already: it was ignored then.
            start = seen.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                matches.append((start, -len(stop), stop))
        if matches:
            start, _, self.found = min(matches)
            self._kept = ""
            return seen[:start]
        kept = max((self._beginning(seen, stop) for stop in self.stops), default=0)
        self._kept = seen[len(seen) - kept :]
        return seen[: len(seen) - kept]

    def finish(self) -> str:
        """What was kept back and did not become a stop string."""
        kept, self._kept = self._kept, ""
        return kept

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """How many of the last characters are the first of `stop`, but not all of it."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class GrowingText:
    """Tokens to text, up to a stop string. Text that may still change or be cut is not given out."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self.text = ""
        """All that has been given out."""
        self._detokenizer = Detokenizer(tokenizer, continues=True)
        self._stops = StopStrings(stops)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that the last token completed."""
        return self._stops.found

    def push(self, token: int, *, ignore_stops: bool) -> str:
        """The text that the token makes certain."""
        return self._give(self._stops.push(self._detokenizer.push([token]), ignore=ignore_stops))

    def finish(self) -> str:
        """The text that was kept back, when no more tokens come; nothing after a stop string."""
        if self.stopped_by is not None:
            return ""
        # Half a character becomes U+FFFD, which no more tokens can follow: too late to stop.
        return self._give(self._stops.push(self._detokenizer.finish(), ignore=True) + self._stops.finish())

    def _give(self, text: str) -> str:
        self.text += text
        return text
