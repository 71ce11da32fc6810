"""The name of a model: a directory, a Hub id, or words about what is wrong with it."""

import pytest

from spec_data.models.resolve import cached_model, local_directory, resolve_model
from spec_data.shards.errors import ConfigError, MissingError
from tests.factory import hub_snapshot


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("/nowhere/at/all", "no such directory"),
        ("a/b/c", "no such directory"),
        ("model.safetensors", "this is one file of a model"),
        (".", r"no config\.json"),
    ],
)
def test_a_path_without_a_model_is_not_looked_up_on_the_hub(name, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(MissingError, match=problem):
        resolve_model(name)


def test_a_revision_of_a_local_directory_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == (tmp_path, None)
    with pytest.raises(ConfigError, match=r"--revision main: .* has no revisions"):
        resolve_model(str(tmp_path), "main")


def test_a_hub_id_is_found_in_the_local_cache_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert local_directory("some/model") is None
    assert cached_model("some/model") is None
    snapshot = hub_snapshot(tmp_path)
    assert cached_model("some/model") is None  # nothing is in it
    (snapshot / "config.json").write_text("{}")
    assert cached_model("some/model") == snapshot
