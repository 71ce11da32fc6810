"""Laws of the size of units: bounds in bytes and tokens, several units, and resumed plans."""

import json

import pytest

from spec_data.generation.plan import unit_tokens
from spec_data.shards.errors import ConfigError
from tests.spec_data.runs import digests, run, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "chats.jsonl", 40)


@pytest.mark.parametrize(
    ("size", "per_token", "tokens", "batch", "expected"),
    [
        ("1MB", 1000, 10**9, 8192, 1000),  # what the user says is all that counts
        ("10B", 1000, 10**9, 8192, 1),
        ("auto", 8206, 10**9, 8192, 60_931),  # 500 MB of a large target
        ("auto", 100, 10**9, 8192, 262_144),  # a small target: the bound in tokens
        ("auto", 407, 1_000_000, 8192, 62_500),  # a small corpus: sixteen units
        ("auto", 407, 1_000_001, 8192, 62_501),
        ("auto", 407, 20_000, 8192, 8192),  # but no less than a batch
        ("auto", 10**9, 10**6, 8192, 1),
    ],
)
def test_a_unit_has_the_tokens_of_the_tightest_bound(size, per_token, tokens, batch, expected):
    assert unit_tokens(size, per_token, tokens, batch) == expected


def test_a_plan_with_another_size_resumes_without_the_flag(target, corpus, tmp_path):
    """Nothing but an explicit size is refused."""
    run(target, corpus, tmp_path / "data", max_shard_size="60KB", workers="1/2")
    before = (tmp_path / "data" / ".generate" / "plan.json").read_bytes()
    with pytest.raises(ConfigError, match="max_shard_size: '60KB' -> '61KB'"):
        run(target, corpus, tmp_path / "data", max_shard_size="61KB")
    run(target, corpus, tmp_path / "data", max_shard_size="auto", workers="1/2")
    assert (tmp_path / "data" / ".generate" / "plan.json").read_bytes() == before
    run(target, corpus, tmp_path / "data", max_shard_size="auto")
    run(target, corpus, tmp_path / "whole", max_shard_size="60KB")
    assert digests(tmp_path / "data") == digests(tmp_path / "whole")
    settings = json.loads((tmp_path / "data" / "manifest.json").read_text())["settings"]
    assert settings["max_shard_size"] == "60KB"
    run(target, corpus, tmp_path / "data", max_shard_size="auto")  # sealed: nothing to do
