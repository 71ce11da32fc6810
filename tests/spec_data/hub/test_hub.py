"""`push` and `pull` with the Hub's own client, against a small server on this machine."""

import copy
import json
import re
import shutil

import datasets
import huggingface_hub
import pytest
import yaml
from huggingface_hub import HfFileSystem, constants

import spec_data
from spec_data import cli
from spec_data.hub.transfer import pull, push
from spec_data.shards.dataset_card import dataset_card
from spec_data.shards.errors import (
    ConfigError,
    DatasetError,
    MissingError,
    RunError,
    TargetError,
)
from spec_data.shards.files import temporary_name
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest, fingerprint
from tests.forked import Forked
from tests.spec_data.hub.hub_server import on_this_machine
from tests.spec_data.runs import digests, run, save_target, verify, write_corpus
from tests.spec_data.shards.integrity_tools import flip

REPO = "me/tiny-states"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    target, corpus = save_target(root / "tiny-llama"), write_corpus(root / "chats.jsonl", 12)
    run(target, corpus, root / "data", codec="default", max_shard_size="20KB")
    return root / "data"


@pytest.fixture
def server(monkeypatch, tmp_path):
    hub = on_this_machine(monkeypatch, tmp_path)
    client = huggingface_hub.HfApi(hub.url, token="t")
    monkeypatch.setattr("spec_data.hub.transfer.hub", lambda: client)
    yield hub
    hub.close()
    assert not hub.unknown, hub.unknown


@pytest.fixture
def pushed(server, data):
    push(data, REPO, private=True)
    return server


def test_what_is_pushed_comes_back_byte_for_byte_and_verifies(pushed, data, tmp_path, capsys):
    assert pushed.private[REPO]
    assert len(pushed.commits[REPO]) == 3  # empty, all but the manifest, the manifest
    assert "manifest.json" not in pushed.commits[REPO][1]
    out = tmp_path / "copy"
    found = pull(REPO, out)
    assert found.documents == 12 and digests(out) == digests(data)
    assert pushed.downloads[-1] == "manifest.json"
    assert not any(name.startswith("documents/") for name in pushed.downloads)
    assert verify(data=str(out), samples=2, device="cpu") == 0
    assert "warning" not in capsys.readouterr().out


def test_the_card_declares_what_load_dataset_opens(pushed, data, tmp_path):
    for name, content in pushed.files(REPO).items():
        if name not in ("state.json", "dataset_info.json"):  # load_dataset reads them only locally
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    card = pushed.files(REPO)["README.md"].decode()
    header = yaml.safe_load(card.split("---")[1])
    assert header["pretty_name"].endswith("tiny-llama")
    assert [c["config_name"] for c in header["configs"]] == ["documents", "states"]
    cache = {"cache_dir": str(tmp_path / "cache"), "split": "train"}
    rows = datasets.load_dataset(str(tmp_path), **cache)
    ds = HiddenStatesDataset(data)
    assert rows["doc_id"] == ds.doc_ids
    assert rows[0]["input_ids"] == ds[0]["input_ids"].tolist()
    assert "<|im_start|>assistant" in rows[0]["text"]
    assert rows[0]["supervised_text"].startswith("answer 0")
    states = datasets.load_dataset(str(tmp_path), "states", **cache)
    assert len(states) == 12 and "hidden.final" in states.column_names
    for fact in ("tiny-llama", "0, 2, 4", "chats.jsonl", "off-policy", "default", "spec-data pull"):
        assert fact in card, fact


def test_load_dataset_opens_the_id(pushed, data, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", pushed.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    HfFileSystem.clear_instance_cache()
    try:
        rows = datasets.load_dataset(REPO, split="train", cache_dir=str(tmp_path / "cache"))
    finally:
        HfFileSystem.clear_instance_cache()
    assert rows["doc_id"] == HiddenStatesDataset(data).doc_ids


def test_the_snippet_of_the_card_runs(pushed, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    pull(REPO, tmp_path / "data")
    card = pushed.files(REPO)["README.md"].decode()
    snippet = card.split("```python\n")[1].split("```")[0]
    exec(compile(snippet, "card", "exec"), {})
    assert "bfloat16" in capsys.readouterr().out


def test_an_interrupted_download_goes_on_with_its_commit(pushed, data, tmp_path):
    out = tmp_path / "copy"
    shard = sorted(n for n in pushed.files(REPO) if n.startswith("shards/"))[1]
    pushed.broken.add(shard)
    with pytest.raises(RunError, match="run the same command again to resume"):
        pull(REPO, out)
    assert not (out / "manifest.json").exists()
    with pytest.raises(ConfigError, match="holds a part of me/tiny-states"):
        pull("me/other", out)
    with pytest.raises(ConfigError, match="at the main branch; resume that download"):
        pull(REPO, out, revision="v2")
    pushed.broken.clear()
    pushed.commits[REPO].append({"README.md": b"changed meanwhile"})
    before = len(pushed.downloads)
    pull(REPO, out)
    assert digests(out) == digests(data)
    assert shard in pushed.downloads[before:] and len(pushed.downloads) - before < len(digests(out))


def test_damage_on_the_way_is_found(pushed, tmp_path):
    shard = sorted(n for n in pushed.files(REPO) if n.startswith("shards/"))[0]
    pushed.damaged.add(shard)
    with pytest.raises(DatasetError, match="damaged on the way, so it was deleted"):
        pull(REPO, tmp_path / "copy")
    pushed.damaged.clear()
    assert pull(REPO, tmp_path / "copy").documents == 12


@pytest.mark.parametrize("name", ["index.arrow", "codec.safetensors", "state.json"])
def test_damage_of_other_files_is_found_too(pushed, data, tmp_path, name):
    pushed.damaged.add(name)
    with pytest.raises(DatasetError, match=f"{name}: damaged on the way, so it was deleted"):
        pull(REPO, tmp_path / "copy")
    assert not (tmp_path / "copy" / "manifest.json").exists()
    pushed.damaged.clear()
    pull(REPO, tmp_path / "copy")
    assert digests(tmp_path / "copy") == digests(data)


def test_pulling_again_completes_what_is_there(pushed, data, tmp_path):
    out = tmp_path / "copy"
    pull(REPO, out)
    (out / "index.arrow").unlink()
    assert pull(REPO, out).documents == 12 and digests(out) == digests(data)
    pushed.commits["me/other"] = [dict(pushed.files(REPO))]
    raw = json.loads(pushed.files(REPO)["manifest.json"])
    raw["target"]["name"] = "another"
    raw["fingerprint"] = fingerprint(raw)
    pushed.files("me/other")["manifest.json"] = json.dumps(raw).encode()
    with pytest.raises(ConfigError, match="holds another dataset; choose another DIR"):
        pull("me/other", out)


def test_shards_of_another_dataset_whose_push_did_not_end_are_removed(pushed, data, tmp_path):
    files = pushed.files(REPO)
    del files["manifest.json"]
    files |= {"shards/unit-00099.arrow": b"x", "documents/notes.md": b"z"}
    pushed.commits["me/mine"] = [{"shards/mine.arrow": b"x"}]  # of no push
    push(data, "me/mine")
    push(data, REPO)
    assert "shards/mine.arrow" in pushed.files("me/mine")
    assert "shards/unit-00099.arrow" not in pushed.files(REPO)
    assert "documents/notes.md" in pushed.files(REPO)
    pull(REPO, tmp_path / "copy")
    assert digests(tmp_path / "copy") == digests(data)


def test_pushing_again_and_pushing_another_dataset(pushed, data, tmp_path):
    left = Forked(lambda: temporary_name(data).mkdir() or 0)  # of a push that was killed
    assert left.wait() == 0 and list(data.parent.glob(".*.tmp"))
    push(data, REPO)  # the same: nothing to refuse
    assert not list(data.parent.glob(".*.tmp"))
    files = pushed.commits[REPO][-1]
    files["manifest.json"] = json.dumps({"fingerprint": "f" * 64}).encode()
    with pytest.raises(ConfigError, match="holds another dataset"):
        push(data, REPO)
    for damaged in (b"[]", b"{"):
        files["manifest.json"] = damaged
        with pytest.raises(DatasetError, match=rf"^{REPO}/manifest\.json: not the manifest"):
            push(data, REPO)


def test_a_public_repository_takes_nothing_private(server, data):
    push(data, REPO)
    before = len(server.commits[REPO])
    with pytest.raises(ConfigError, match="is public: make it private"):
        push(data, REPO, private=True)
    assert len(server.commits[REPO]) == before


def test_a_name_without_its_owner_is_completed(server, data):
    assert push(data, "plain").repo == "me/plain"
    assert push(data, "plain").next_command == ("spec-data", "pull", "me/plain", "DIR")


def test_texts_that_only_code_of_strangers_could_decode_are_left_out(
    server, data, monkeypatch, caplog
):
    def refuse(*_):
        assert REPO not in server.commits  # what fails here leaves no empty repository
        raise TargetError("pass trust_remote_code=True")

    monkeypatch.setattr("spec_data.hub.transfer.load_tokenizer", refuse)
    push(data, REPO)
    assert "warning[viewer]" in caplog.text and "manifest.json" in server.commits[REPO][-1]


def test_what_is_refused(server, data, tmp_path):
    with pytest.raises(MissingError, match="no such dataset on the Hub"):
        pull("me/nothing", tmp_path / "a")
    with pytest.raises(ConfigError, match="not the name of a repository"):
        pull("a/b/c", tmp_path / "a")
    with pytest.raises(MissingError, match="not a spec-data dataset"):
        push(tmp_path, REPO)
    spec_data.select(data, tmp_path / "view", where="number < 3")
    with pytest.raises(ConfigError, match="make a dataset of it with `spec-data copy`"):
        push(tmp_path / "view", REPO)
    shutil.copytree(data, tmp_path / "damaged")
    (tmp_path / "damaged" / "state.json").rename(tmp_path / "state.json")
    with pytest.raises(MissingError, match=r"damaged/state\.json: missing; copy or generate"):
        push(tmp_path / "damaged", REPO)
    (tmp_path / "state.json").rename(tmp_path / "damaged" / "state.json")
    names = tmp_path / "damaged" / "target" / "config.json"
    text = names.read_text()
    names.write_text(text + " ")
    with pytest.raises(DatasetError, match=r"config\.json: not as it was sealed"):
        push(tmp_path / "damaged", REPO)
    names.write_text(text)
    shard = tmp_path / "damaged" / HiddenStatesDataset(data).manifest.shards[0].file
    flip(shard)  # in a hidden state
    with pytest.raises(DatasetError, match=shard.name):
        push(tmp_path / "damaged", REPO)
    server.commits["me/other"] = [{"x.txt": b"x"}]
    with pytest.raises(DatasetError, match=r"no manifest\.json"):
        pull("me/other", tmp_path / "a")
    with pytest.raises(MissingError, match="no such revision"):
        pull("me/other", tmp_path / "a", revision="v9")
    (tmp_path / "x").touch()
    with pytest.raises(ConfigError, match="not empty"):
        pull(REPO, tmp_path)
    with pytest.raises(ConfigError, match="this is a file"):
        pull(REPO, tmp_path / "x")
    (tmp_path / "part").mkdir()
    asked = {"repo": REPO, "revision": None}
    for text in ("{}", "[", '{"repo": 1}', *(json.dumps(asked | {"commit": c}) for c in (None, 5))):
        (tmp_path / "part" / ".pull.json").write_text(text)
        with pytest.raises(DatasetError, match=r"\.pull\.json: damaged; choose another DIR"):
            pull(REPO, tmp_path / "part")


def test_the_commands_and_the_functions(server, data, tmp_path, capsys):
    assert cli.main(["push", str(data), REPO, "--dry-run"]) == 0
    assert "nothing was uploaded" in capsys.readouterr().out and REPO not in server.commits
    assert cli.main(["push", str(data), REPO]) == 0
    assert f"next:  spec-data pull {REPO} DIR" in capsys.readouterr().err
    assert cli.main(["pull", REPO, str(tmp_path / "a"), "--dry-run"]) == 0
    assert "nothing was downloaded" in capsys.readouterr().out
    assert cli.main(["pull", REPO, str(tmp_path / "a")]) == 0
    assert "next:  spec-data verify" in capsys.readouterr().err
    assert spec_data.pull(REPO, tmp_path / "b").documents == 12
    assert spec_data.push(data, REPO).uploaded


def test_a_hub_that_cannot_be_reached(server, data, tmp_path, monkeypatch):
    closed = huggingface_hub.HfApi("http://127.0.0.1:9", token="t")
    monkeypatch.setattr("spec_data.hub.transfer.hub", lambda: closed)
    with pytest.raises(RunError, match="run the same command again"):
        pull(REPO, tmp_path / "a")
    with pytest.raises(RunError, match="run the same command again"):
        push(data, REPO)


@pytest.mark.parametrize(
    "text", ["..\ngated: true", "a | b\n| c | d", "![x](http://e) <img src=`|`>"]
)
def test_a_strangers_names_and_licence_are_only_texts_in_the_card(data, text):
    raw = json.loads((data / "manifest.json").read_text())
    plain = dataset_card(Manifest.of(copy.deepcopy(raw)))
    raw["target"]["name"] = text
    raw["corpus"][0] |= {"source": text, "licence": text}
    found = dataset_card(Manifest.of(raw))
    headers = [yaml.safe_load(c.split("---\n")[1]) for c in (plain, found)]
    assert headers[1].pop("license_name") == " ".join(text.split())
    assert headers[0].keys() == headers[1].keys() and headers[1]["license"] == "other"
    bodies = [re.sub(r"\\.", "", c.split("---\n", 2)[2]) for c in (plain, found)]
    for markup in ("\n", "|", "`", "<", "[", "*"):  # what is escaped is not counted
        assert bodies[0].count(markup) == bodies[1].count(markup), markup
