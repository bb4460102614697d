"""A journal whose route does as a test says."""

from __future__ import annotations

import pytest

from gazette_sdk.transport.append import appender as service
from support.scripted_appends import NEVER_S, ScriptedJournal


@pytest.fixture
def journal(monkeypatch):
    """A journal; the event loop receives no inline answer by itself."""
    monkeypatch.setattr(service, "SWEEP_S", NEVER_S)
    with ScriptedJournal() as journal:
        yield journal
