"""A dataset with added layers on the Hub: pushed whole, pulled whole or in part."""

import datasets
import pytest
import torch
import yaml

from spec_data.added_layers.run import add_layers
from spec_data.hub.pull import pull
from spec_data.hub.push import push
from spec_data.options.dataset_options import VerifyConfig
from spec_data.options.hub_options import PullConfig, PushConfig
from spec_data.options.layer_options import AddLayersConfig
from spec_data.shards.reader import HiddenStatesDataset
from tests.spec_data.hub import test_read_from_hub
from tests.spec_data.runs import digests, run, save_target, verify, write_corpus

server = test_read_from_hub.server
REPO = "me/wide"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Layers 0 and 4, and 1 and 3 beside them."""
    root = tmp_path_factory.mktemp("sides")
    target = save_target(root / "target")
    corpus = write_corpus(root / "chats.jsonl", 12)
    run(target, corpus, root / "plain", layers="0,4", max_shard_size="15KB", codec="lm4c")
    given = {"data": str(root / "plain"), "target": str(target), "out": str(root / "wide")}
    add_layers(AddLayersConfig(**given, layers="1,3", device="cpu"))
    return root / "wide"


def test_added_layers_come_back_byte_for_byte(server, wide, tmp_path, capsys):
    push(PushConfig(data=str(wide), repo=REPO))
    out = tmp_path / "copy"
    assert pull(PullConfig(repo=REPO, out=str(out))).documents == 12
    assert digests(out) == digests(wide)
    assert HiddenStatesDataset(out).manifest.layers == (0, 1, 3, 4)
    assert verify(VerifyConfig(data=str(out), samples=2, device="cpu")) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("layers", ["1,4", "1,3", "0,4"])
def test_a_part_of_them_is_what_a_local_reader_reads(server, wide, tmp_path, layers):
    push(PushConfig(data=str(wide), repo=REPO))
    out = tmp_path / "part"
    pull(PullConfig(repo=REPO, out=str(out), layers=layers))
    kept = [int(layer) for layer in layers.split(",")]
    here, there = HiddenStatesDataset(wide), HiddenStatesDataset(out)
    assert there.manifest.layers == tuple(kept)
    for index in (0, 11):
        for layer in kept:
            name = f"hidden.L{layer}"
            assert torch.equal(here[index][name], there[index][name])
    assert verify(VerifyConfig(data=str(out), samples=2, device="cpu")) == 0


def test_datasets_opens_the_states_and_the_added_ones(server, wide, tmp_path):
    """By the configurations of the card: files with other columns are no rows of one table."""
    push(PushConfig(data=str(wide), repo=REPO))
    for name, content in server.files(REPO).items():
        if name not in ("state.json", "dataset_info.json"):  # load_dataset reads them only locally
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    card = server.files(REPO)["README.md"].decode()
    header = yaml.safe_load(card.split("---")[1])
    names = [config["config_name"] for config in header["configs"]]
    assert names == ["documents", "states", "states-side1"]
    given = {"cache_dir": str(tmp_path / "cache"), "split": "train"}
    found = {name: datasets.load_dataset(str(tmp_path), name, **given) for name in names}
    assert {len(rows) for rows in found.values()} == {12}
    ids = HiddenStatesDataset(wide).doc_ids
    assert all(rows["doc_id"] == ids for rows in found.values())
    assert "hidden.L0" in found["states"].column_names
    assert "hidden.L1" in found["states-side1"].column_names
