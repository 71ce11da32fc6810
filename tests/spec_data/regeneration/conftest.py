"""Fixtures of the tests of regenerate."""

import pytest

from spec_data.regeneration.local import LocalBackend


@pytest.fixture
def as_text(monkeypatch):
    """Answers stay texts, though a random target seldom writes what its tokenizer would."""
    monkeypatch.setattr(LocalBackend, "rows", lambda self, chat, answers: [chat.row(answers)])
