"""What others know of a kind of draft stands in its folder."""

import subprocess
import sys

import msgspec
import pytest

from spec_data.shards import draft_kinds as registry
from spec_train.drafts.kinds import kind_named


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """An empty place for kinds, in place of this project's."""
    monkeypatch.setattr(registry, "FOLDERS", tmp_path)
    registry.draft_kinds.cache_clear()
    yield tmp_path
    registry.draft_kinds.cache_clear()


def add(folders, name, text):
    (folders / name).mkdir()
    (folders / name / "kind.toml").write_text(text)


def test_every_folder_is_a_kind_whose_class_reads_so_many_layers():
    for name, kind in registry.draft_kinds().items():
        draft = kind_named(name).draft_class()
        assert draft.config_class.draft == name
        if not kind.target_block:  # what such a block reads is its target's
            assert draft.config_class.reads_layers == bool(kind.layers), name
    assert sum(kind.default for kind in registry.draft_kinds().values()) == 1


def test_kinds_stand_by_place_then_by_name(folders):
    add(folders, "b", 'class = "draft:B"\nlayers = 0')
    add(folders, "a", 'class = "draft:A"\nlayers = 0\ndefault = true')
    add(folders, "last", 'class = "draft:C"\nlayers = 5\nplace = 1')
    (folders / "block").mkdir()  # shared code is no kind
    assert list(registry.draft_kinds()) == ["last", "a", "b"]
    assert registry.default_kind() == "a"


def test_a_misspelt_fact_is_an_error(folders):
    add(folders, "a", 'class = "draft:A"\nlayers = 0\nlayer = 3')
    with pytest.raises(msgspec.ValidationError, match="layer"):
        registry.draft_kinds()


def test_a_capture_knows_the_kinds_without_the_code_of_the_trainer():
    program = "import sys; from spec_data.shards.layer_ids import RECIPES; print(*RECIPES); "
    program += "assert not [m for m in sys.modules if m.startswith(('spec_train', 'torch'))]"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"eagle", "eagle3", "dspark"} <= set(done.stdout.split())
