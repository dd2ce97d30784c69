"""Bad clients against a live gateway: what `benchmarks/gateway.py soak` does for minutes, for seconds."""

import importlib.util
import sys
from types import ModuleType

import pytest
from example_specs import ROOT
from tiny_server import TOKENIZER, tiny_engine

from palestra.generate.local import LocalGenerator

MANY = {"half_open": 8, "slow": 2, "idle": 4, "killed": 2, "good": 2}


@pytest.fixture
def gateway_soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark's module, with the gateway's limits in tenths of seconds."""
    spec = importlib.util.spec_from_file_location("gateway_soak", ROOT / "benchmarks" / "gateway_soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gateway_soak", module)
    spec.loader.exec_module(module)
    for name in ("HEADER_SECONDS", "STALL_SECONDS"):
        monkeypatch.setattr(f"palestra.generate.serve.listen.{name}", 0.5)
    for name, number in MANY.items():
        monkeypatch.setattr(module, name.upper(), number)
    return module


def test_bad_clients_leave_no_slot_page_session_connection_thread_or_file(gateway_soak):
    with LocalGenerator(tiny_engine(), drive="thread") as generator:
        line = gateway_soak.soak(generator, TOKENIZER, seconds=0.5, wave=0.5, idle=1.0)
    assert line["leaked"] == {}
    assert line["waves"] >= 2
    assert all(line[kind] == MANY[kind] * line["waves"] for kind in ("half_open", "slow", "idle", "killed"))
    assert line["good"] == MANY["good"] * (line["waves"] + 1)


def test_session_that_is_never_ended_is_counted_as_leaked(gateway_soak, monkeypatch):
    monkeypatch.setattr(gateway_soak, "DRAIN_SECONDS", 1.0)
    monkeypatch.setattr(gateway_soak.Soak, "_wave", lambda self: self._forgotten())

    async def forgotten(self) -> None:
        self._opened()

    monkeypatch.setattr(gateway_soak.Soak, "_forgotten", forgotten, raising=False)
    with LocalGenerator(tiny_engine(), drive="thread") as generator:
        line = gateway_soak.soak(generator, TOKENIZER, seconds=0.0, wave=1.0, idle=60.0)
    assert line["leaked"] == {"sessions": 1, "session_objects": 1}
