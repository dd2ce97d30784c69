"""Stats: the latest number and the sum of seconds since the last row."""

from itertools import count

import pytest

from palestra.track import sinks as module
from palestra.track.sinks import Stats


def test_export_has_the_latest_number_and_forgets_it():
    stats = Stats()
    stats.last("lr", 9)
    stats.last("lr", 0.5)
    assert stats.export() == {"lr": 0.5}
    assert stats.export() == {}


def test_timer_adds_up_seconds_under_time_whatever_is_raised(monkeypatch):
    clock = count(0, 2)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    stats = Stats()
    with stats.timer("learn"):
        pass
    with pytest.raises(KeyError), stats.timer("learn"):
        raise KeyError
    assert stats.export() == {"time/learn": 4.0}
