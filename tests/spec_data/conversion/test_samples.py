"""Every layout is read as its format says; malformed samples and other releases are named."""

import shutil
from dataclasses import replace

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_data.conversion.samples import NEXT, Samples, load_table
from spec_data.corpus.bad_rows import BadRow
from spec_data.shards.errors import CorpusError, DatasetError, MissingError, TargetError
from tests.spec_data.conversion import layouts as write
from tests.spec_train.fitted import edit

LAYERS = (1, 2, 4)


def opened(tool, root, hidden_size=32) -> Samples:
    return Samples(tool, root, hidden_size)


@pytest.mark.parametrize(
    ("tool", "given", "recorded", "after"),
    [
        ("speculators", {}, None, False),
        ("specforge", {}, None, True),
        ("specforge", {"packed": True}, None, True),
        ("deepspec", {}, LAYERS, True),
        ("automodel", {}, LAYERS, True),
        ("modelopt", {"layers": LAYERS}, None, True),
        ("torchspec", {"layers": LAYERS}, None, True),
        ("torchspec", {"layers": LAYERS, "before": True}, None, False),
    ],
)
def test_a_layout_is_read_bit_for_bit(tool, given, recorded, after, tmp_path, samples):
    found = opened(tool, getattr(write, tool)(tmp_path / "src", samples, **given))
    assert len(found) == len(samples) and found.layers == len(LAYERS)
    assert found.opened.layers == recorded
    order = range(len(samples))
    if tool == "modelopt":  # names are no numbers of rows
        order = [int(found.opened.names[n].split("-")[1].split(".")[0]) for n in order]
    for number, i in enumerate(order):
        sample = samples[i]
        (ids, mask), states = found.tokens(number), found.states(number)
        assert torch.equal(ids, sample.ids) and torch.equal(mask, sample.mask)
        assert torch.equal(states.aux.flatten(1), sample.aux(LAYERS))
        assert torch.equal(states.last, sample.final if after else sample.layers[5])
    assert all(file.is_file() for file in found.opened.files)


def test_only_trailing_unsupervised_tokens_of_one_id_are_the_padding_of_automodel(
    tmp_path, samples
):
    few = [replace(s, ids=s.ids.clone(), mask=s.mask.clone()) for s in samples[:5]]
    longest = max(range(5), key=lambda i: len(few[i].ids))
    few[0].ids[-1] = write.PAD  # an answer that ends in the token that rows are filled with
    root = write.automodel(tmp_path / "src", few, left=2)
    shard = root / "shard-000000.safetensors"
    table = load_file(shard)
    table["loss_mask"][longest, -1] = 1  # nothing was filled up
    table["input_ids"][1], table["loss_mask"][1] = write.PAD, 0
    save_file(table, shard)
    found = opened("automodel", root)
    ids, mask = found.tokens(0)
    assert ids.tolist() == [write.PAD] * 2 + few[0].ids.tolist()
    assert mask.tolist() == [0, 0, *few[0].mask.tolist()]
    assert torch.equal(found.states(0).last, table["target_last_hidden_states"][0, : len(ids)])
    assert len(found.tokens(longest)[0]) == table["input_ids"].shape[1]
    with pytest.raises(BadRow, match="nothing but padding"):
        found.tokens(1)
    edit(root / "manifest.json", complete=False)
    with pytest.raises(DatasetError, match="not complete"):
        opened("automodel", root)


def test_the_last_answer_token_is_no_padding_where_masks_are_one_earlier(tmp_path, samples):
    """Not even where it is the token that rows are filled with, as end tokens often are."""
    few = [replace(s, ids=s.ids.clone(), mask=s.mask.roll(-1)) for s in samples[:3]]
    for sample in few:
        sample.ids[-1] = write.PAD
    found = opened("automodel", write.automodel(tmp_path / "src", few))
    found.frame = NEXT
    for number, sample in enumerate(few):
        ids, mask = found.tokens(number)
        assert ids.tolist() == sample.ids.tolist()
        assert mask.tolist() == samples[number].mask.tolist() and mask[-1] == 1
        assert torch.equal(found.states(number).last, sample.final)


def test_eight_bit_states_are_decoded(tmp_path, samples):
    coarse, fine = torch.float8_e5m2, torch.float8_e4m3fn
    for tool, root, kind in (
        ("speculators", write.speculators(tmp_path / "a", samples, fp8=True), fine),
        ("deepspec", write.deepspec(tmp_path / "b", samples, dtype="float8_e4m3fn"), fine),
        ("deepspec", write.deepspec(tmp_path / "c", samples, dtype="float8_e5m2"), coarse),
    ):
        states = opened(tool, root).states(3).aux.flatten(1).float()
        exact = samples[3].aux(LAYERS).float()
        assert 0 < (states - exact).norm() / exact.norm() < torch.finfo(kind).eps / 2


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")  # PyTorch 2.14 warns
@pytest.mark.parametrize(
    ("what", "value", "reason"),
    [
        ("loss_mask", None, "loss_mask has"),
        ("loss_mask", torch.full((43,), -1), "more than 0 and 1"),
        ("loss_mask", torch.full((43,), 256), "more than 0 and 1"),
        ("aux_hidden_state", None, "the aux states: shape"),
        ("hidden_state", torch.zeros(1, 3, 32), "the last state: shape"),
        ("hidden_state", torch.zeros(1, 43, 32, dtype=torch.long), "expected floating point"),
        ("input_ids", torch.rand(43), "expected integers"),
        ("input_ids", torch.arange(43).to_sparse(), "is sparse"),
    ],
)
def test_malformed_tables_are_bad_rows(tmp_path, samples, what, value, reason):
    root = write.specforge(tmp_path / "src", samples)
    file = root / "rows_0-2000" / "data_2.ckpt"
    table = torch.load(file, weights_only=True)
    table[what] = value if value is not None else table[what][..., :-1]
    torch.save(table, file)
    found = opened("specforge", root)
    found.tokens(1)
    with pytest.raises(BadRow, match=reason.replace("[", r"\[")):
        found.tokens(2)


def test_files_that_could_run_code_are_not_loaded(tmp_path):
    class Code:
        def __reduce__(self):
            return (print, ("ran",))

    torch.save({"input_ids": Code()}, tmp_path / "x.ckpt")
    with pytest.raises(BadRow, match="could run"):
        load_table(tmp_path / "x.ckpt")
    torch.save([1, 2], tmp_path / "y.ckpt")
    with pytest.raises(BadRow, match="not a table"):
        load_table(tmp_path / "y.ckpt")
    (tmp_path / "z.ckpt").write_bytes(b"PK\x03\x04 no archive")
    (tmp_path / "z.ckpt.gz").write_bytes(b"no gzip")
    for name in ("z.ckpt", "z.ckpt.gz"):
        with pytest.raises(BadRow, match="damaged"):
            load_table(tmp_path / name)


def test_states_of_another_row_and_of_fewer_layers_are_bad_rows(tmp_path, samples):
    root = write.speculators(tmp_path / "src", samples)
    files = root / "hidden_states"
    shutil.copy(files / "hs_4.safetensors", files / "hs_2.safetensors")
    few = write.speculators(tmp_path / "few", samples[:1], layers=(1, 2))
    shutil.copy(few / "hidden_states/hs_0.safetensors", files / "hs_3.safetensors")
    found = opened("speculators", root)
    for number in (2, 3):
        with pytest.raises(BadRow):
            found.tokens(number)


def test_rows_without_states_are_left_out(tmp_path, samples, caplog):
    root = write.speculators(tmp_path / "src", samples)
    (root / "hidden_states" / "hs_0.safetensors").unlink()
    found = opened("speculators", root)
    assert len(found) == len(samples) - 1 and found.opened.names[0].endswith("hs_1.safetensors")
    assert "warning[left-out-samples]" in caplog.text and "1 of 12 rows have no file" in caplog.text
    save_file({"x": torch.zeros(1)}, root / "hidden_states" / "hs_99.safetensors")
    with pytest.raises(DatasetError, match="belong to another one"):
        opened("speculators", root)


def test_samples_of_another_split_are_left_out(tmp_path, samples, caplog):
    root = write.torchspec(tmp_path / "src", samples[:4], layers=LAYERS)
    rows = (root / "manifest.jsonl").read_text().splitlines()
    rows[1] = rows[1].replace('"train"', '"eval"')
    (root / "manifest.jsonl").write_text("\n".join(rows))
    assert len(opened("torchspec", root)) == 3
    assert "warning[left-out-samples]" in caplog.text
    assert "1 samples of other splits are left out" in caplog.text


def test_a_truncated_shard_is_a_bad_row(tmp_path, samples):
    root = write.deepspec(tmp_path / "src", samples)
    data = (root / "shard-00000.bin").read_bytes()
    (root / "shard-00000.bin").write_bytes(data[:-100])
    found = opened("deepspec", root)
    found.tokens(0)
    with pytest.raises(BadRow, match="truncated"):
        found.tokens(4)


def test_masks_as_run_lengths(tmp_path, samples):
    root = write.torchspec(tmp_path / "src", samples[:4], layers=LAYERS)
    for name, packed in ((0, "5,2"), (1, "1,-2"), (2, "a"), (3, "5," + "9" * 30)):
        file = root / "samples" / f"{name}.pt"
        torch.save(torch.load(file, weights_only=True) | {"packed_loss_mask": packed}, file)
    found = opened("torchspec", root)
    assert found.tokens(0)[1].tolist() == [0] * 5 + [1] * 2 + [0] * (len(samples[0].ids) - 7)
    assert found.tokens(3)[1].tolist() == [0] * 5 + [1] * (len(samples[3].ids) - 5)
    for number, reason in ((1, "negative"), (2, "expected lengths")):
        with pytest.raises(BadRow, match=reason):
            found.tokens(number)


def written(name, data):
    """Return what spoils a directory: `data` in a file of it."""
    return lambda root: (root / name).write_bytes(data)


def manifest(name="manifest.json", **changes):
    return lambda root: edit(root / name, **changes)


NOT_READ = [  # (tool, how its directory is spoilt, the error, what it says)
    ("deepspec", shutil.rmtree, MissingError, "no such directory"),
    ("deepspec", manifest(version=1), DatasetError, "version"),
    ("deepspec", manifest(hidden_dtype=["x"]), DatasetError, r"manifest\.json"),
    ("deepspec", manifest(hidden_size=33), TargetError, "width 99"),
    ("deepspec", manifest(num_samples=0, shards=[]), DatasetError, "not of 0 samples"),
    ("automodel", manifest(target_probs_topk=8), DatasetError, "no final state"),
    ("automodel", manifest(shard_size=-5), DatasetError, "shard_size"),
    ("torchspec", manifest("dataset.json", version=2), DatasetError, "version"),
    ("torchspec", written("manifest.jsonl", b"\xff\n"), DatasetError, "not the rows of TorchSpec"),
    ("torchspec", written("manifest.jsonl", b'{"file": "/a.pt", "split": "train"}'),
     DatasetError, "not the rows of TorchSpec"),
    ("torchspec", written("manifest.jsonl", b'{"file": "../a.pt", "split": "train"}'),
     DatasetError, "lies outside"),
    ("speculators", written("data_0.pt", b""), DatasetError, "disagree on what the last state is"),
    ("speculators", written("state.json", b"{}"), DatasetError, "cannot be read"),
    ("speculators", lambda root: (root / "hidden_states").rename(root / "old"),
     MissingError, "hidden_states/hs_0"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "spoil", "error", "words"), NOT_READ)
def test_what_cannot_be_read_is_refused_by_name(tool, spoil, error, words, tmp_path, samples):
    root = getattr(write, tool)(tmp_path / tool, samples[:2])
    spoil(root)
    with pytest.raises(error, match=words):
        opened(tool, root)


@pytest.mark.parametrize(
    "tool", ["speculators", "specforge", "deepspec", "automodel", "modelopt", "torchspec"]
)
def test_a_directory_of_something_else_is_refused(tool, tmp_path):
    (tmp_path / "data_0.old").touch()
    with pytest.raises(MissingError):
        opened(tool, tmp_path)


def test_rubbish_in_the_rows_and_files_of_speculators(tmp_path, samples):
    root = write.speculators(tmp_path / "src", samples[:3])
    files = root / "hidden_states"
    table = load_file(files / "hs_0.safetensors")
    whole = table["hidden_states"].view(torch.int16)
    save_file(table | {"hidden_states": whole}, files / "hs_0.safetensors")
    scaled = load_file(files / "hs_1.safetensors") | {"hidden_states_scales": torch.ones(5, 1, 1)}
    save_file(scaled, files / "hs_1.safetensors")
    found = opened("speculators", root)
    for number, reason in ((0, "expected floating"), (1, "hidden_states_scales has shape")):
        with pytest.raises(BadRow, match=reason):
            found.tokens(number)
    other = tmp_path / "other"
    datasets.Dataset.from_list([{"input_ids": [[1], [3]]}]).save_to_disk(str(other))
    (other / "hidden_states").mkdir()
    shutil.copy(files / "hs_2.safetensors", other / "hidden_states/hs_0.safetensors")
    with pytest.raises(CorpusError, match="integers"):
        opened("speculators", other)
