"""Every layout is read as its format says; malformed samples and other releases are named."""

import json
import shutil
from dataclasses import replace

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_data.conversion.layouts import open_layout
from spec_data.conversion.stored_samples import AFTER, BEFORE, Conventions, TargetSizes
from spec_data.conversion.table_layout import load_table
from spec_data.corpus.bad_rows import BadRow
from spec_data.shards.errors import ConfigError, DatasetError, MissingError, TargetError
from tests.spec_data.conversion import layouts as write

SIZES = TargetSizes(blocks=6, hidden_size=32)
LAYERS = (1, 2, 4)

# name: (tool, --stored-layers in its counting, writer, is the last state after the norm?)
FORMS = {
    "speculators": ("speculators", (2, 3, 5), write.speculators, False),
    "speculators, last layer named": ("speculators", (2, 3, 5, 6), write.speculators, False),
    "specforge": ("specforge", (1, 2, 4), write.specforge, True),
    "specforge, compressed": (
        *("specforge", (1, 2, 4)),
        lambda root, s: write.specforge(root, s, packed=True),
        True,
    ),
    "deepspec": ("deepspec", None, write.deepspec, True),
    "automodel": ("automodel", None, write.automodel, True),
    "modelopt": (
        *("modelopt", (1, 2, 4)),
        lambda root, s: write.modelopt(root, s, layers=LAYERS),
        True,
    ),
    "torchspec": (
        *("torchspec", (1, 2, 4)),
        lambda root, s: write.torchspec(root, s, layers=LAYERS),
        True,
    ),
    "torchspec, before the norm": (
        *("torchspec", (1, 2, 4)),
        lambda root, s: write.torchspec(root, s, layers=LAYERS, before=True),
        False,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_layout_is_read_bit_for_bit(form, tmp_path, samples):
    tool, given, writer, after = FORMS[form]
    found = open_layout(tool, writer(tmp_path / "src", samples), given, SIZES)
    assert len(found) == len(samples)
    assert found.conventions.layers == LAYERS
    assert found.conventions.final_norm == (AFTER if after else BEFORE)
    order = range(len(samples))
    if tool == "modelopt":  # names are no numbers of rows
        order = [int(found.where(n).split("-")[1].split(".")[0]) for n in order]
    for number, i in enumerate(order):
        sample = samples[i]
        tokens, states = found.tokens(number), found.states(number)
        assert torch.equal(tokens.ids, sample.ids)
        assert torch.equal(tokens.mask, sample.mask)
        assert torch.equal(states.aux.flatten(1), sample.aux(LAYERS))
        assert torch.equal(states.last, sample.final if after else sample.layers[5])
    assert all(file.is_file() for file in found.files())


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
    found = open_layout("automodel", root, None, SIZES)
    tokens = found.tokens(0)
    assert tokens.ids.tolist() == [write.PAD] * 2 + few[0].ids.tolist()
    assert tokens.mask.tolist() == [0, 0, *few[0].mask.tolist()]
    assert torch.equal(
        found.states(0).last, table["target_last_hidden_states"][0, : len(tokens.ids)]
    )
    assert len(found.tokens(longest).ids) == table["input_ids"].shape[1]
    with pytest.raises(BadRow, match="nothing but padding"):
        found.tokens(1)
    change(root / "manifest.json", complete=False)
    with pytest.raises(DatasetError, match="not complete"):
        open_layout("automodel", root, None, SIZES)


def test_eight_bit_states_are_decoded(tmp_path, samples):
    sources = {
        "speculators": write.speculators(tmp_path / "a", samples, fp8=True),
        "deepspec": write.deepspec(tmp_path / "b", samples, dtype="float8_e4m3fn"),
    }
    sources["deepspec "] = write.deepspec(tmp_path / "c", samples, dtype="float8_e5m2")
    for name, root in sources.items():
        tool = name.strip()
        found = open_layout(tool, root, (2, 3, 5) if tool == "speculators" else None, SIZES)
        states = found.states(3).aux.flatten(1).float()
        exact = samples[3].aux(LAYERS).float()
        kind = torch.float8_e5m2 if name != tool else torch.float8_e4m3fn
        assert 0 < (states - exact).norm() / exact.norm() < torch.finfo(kind).eps / 2


def test_the_usual_layers_of_each_tool(tmp_path, samples):
    sizes = TargetSizes(blocks=36, hidden_size=32)
    for tool, writer in (("specforge", write.specforge), ("torchspec", write.torchspec)):
        found = open_layout(tool, writer(tmp_path / tool, samples[:1]), None, sizes)
        assert found.conventions.layers == (1, 17, 32)
    found = open_layout("modelopt", write.modelopt(tmp_path / "m", samples[:1]), None, sizes)
    assert found.conventions.layers == (1, 17, 32)
    found = open_layout("speculators", write.speculators(tmp_path / "s", samples[:1]), None, sizes)
    assert found.conventions.stored_layers == (2, 18, 33)
    assert found.conventions.layers == (1, 17, 32)


def test_counting_and_order_of_layers():
    inputs = Conventions(counting="inputs", stored_layers=(0, 5, 2), final_norm=AFTER)
    assert inputs.layers == (-1, 4, 1)
    assert inputs.in_their_counting(inputs.layers) == [0, 5, 2]


def broken(root, tool, what, value=None):
    """Break sample 2 of a layout."""
    if tool == "specforge":
        file = root / "rows_0-2000" / "data_2.ckpt"
        table = torch.load(file, weights_only=True)
        table[what] = value if value is not None else table[what][..., :-1]
        torch.save(table, file)
    elif tool == "speculators":
        file = root / "hidden_states" / "hs_2.safetensors"
        table = load_file(file)
        table[what] = value if value is not None else table[what][:-1].contiguous()
        save_file(table, file)


@pytest.mark.parametrize(
    ("what", "value", "reason"),
    [
        ("loss_mask", None, "loss_mask has"),
        ("aux_hidden_state", None, "the aux states: shape"),
        ("hidden_state", torch.zeros(1, 3, 32), "the last state: shape"),
        ("hidden_state", torch.zeros(1, 43, 32, dtype=torch.long), "expected floating point"),
        ("input_ids", torch.rand(43), "expected integers"),
        ("input_ids", torch.arange(43).to_sparse(), "no dense tensor"),
    ],
)
def test_malformed_tables_are_bad_rows(tmp_path, samples, what, value, reason):
    root = write.specforge(tmp_path / "src", samples)
    broken(root, "specforge", what, value)
    found = open_layout("specforge", root, LAYERS, SIZES)
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
    for name in ("z.ckpt", "z.ckpt.gz", "missing.ckpt"):
        with pytest.raises(BadRow, match="damaged"):
            load_table(tmp_path / name)


def test_states_of_another_row_and_of_more_layers_are_bad_rows(tmp_path, samples):
    root = write.speculators(tmp_path / "src", samples)
    files = root / "hidden_states"
    shutil.copy(files / "hs_4.safetensors", files / "hs_2.safetensors")
    found = open_layout("speculators", root, (2, 3, 5), SIZES)
    with pytest.raises(BadRow, match="states of other tokens"):
        found.tokens(2)
    more = open_layout("speculators", root, (1, 2, 3, 5), SIZES)
    with pytest.raises(BadRow, match="name the layers with --stored-layers"):
        more.tokens(1)


def test_rows_without_states_are_left_out(tmp_path, samples, caplog):
    root = write.speculators(tmp_path / "src", samples)
    (root / "hidden_states" / "hs_0.safetensors").unlink()
    found = open_layout("speculators", root, (2, 3, 5), SIZES)
    assert len(found) == len(samples) - 1 and found.where(0).endswith("hs_1.safetensors")
    assert "1 of 12 rows have no file" in caplog.text
    save_file({"x": torch.zeros(1)}, root / "hidden_states" / "hs_99.safetensors")
    with pytest.raises(DatasetError, match="belong to another one"):
        open_layout("speculators", root, (2, 3, 5), SIZES)


def test_a_truncated_shard_is_a_bad_row(tmp_path, samples):
    root = write.deepspec(tmp_path / "src", samples)
    data = (root / "shard-00000.bin").read_bytes()
    (root / "shard-00000.bin").write_bytes(data[:-100])
    found = open_layout("deepspec", root, None, SIZES)
    found.tokens(0)
    with pytest.raises(BadRow, match="truncated"):
        found.tokens(4)


def test_masks_as_run_lengths(tmp_path, samples):
    root = write.torchspec(tmp_path / "src", samples[:4], layers=LAYERS)
    for name, packed in ((0, "5,2"), (1, "1,-2"), (2, "a"), (3, "5," + "9" * 30)):
        file = root / "samples" / f"{name}.pt"
        torch.save(torch.load(file, weights_only=True) | {"packed_loss_mask": packed}, file)
    found = open_layout("torchspec", root, LAYERS, SIZES)
    assert found.tokens(0).mask.tolist() == [0] * 5 + [1] * 2 + [0] * (len(samples[0].ids) - 7)
    assert found.tokens(3).mask.tolist() == [0] * 5 + [1] * (len(samples[3].ids) - 5)
    for number, reason in ((1, "negative"), (2, "expected lengths")):
        with pytest.raises(BadRow, match=reason):
            found.tokens(number)


def test_a_mask_that_is_not_stored_is_told(tmp_path, samples):
    root = write.modelopt(tmp_path / "src", samples[:1], layers=LAYERS, masks=False)
    assert open_layout("modelopt", root, LAYERS, SIZES).tokens(0).mask is None


def change(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_cannot_be_read_is_refused_by_name(tmp_path, samples):
    with pytest.raises(MissingError, match="no such directory"):
        open_layout("deepspec", tmp_path / "nowhere", None, SIZES)
    for tool in ("speculators", "specforge", "deepspec", "automodel", "modelopt", "torchspec"):
        (tmp_path / tool).mkdir()
        with pytest.raises(MissingError):
            open_layout(tool, tmp_path / tool, LAYERS, SIZES)
    old = tmp_path / "old"
    old.mkdir()
    (old / "data_0.pt").touch()
    with pytest.raises(DatasetError, match="older release of speculators"):
        open_layout("speculators", old, None, SIZES)
    cache = write.automodel(tmp_path / "cache", samples)
    with pytest.raises(TargetError, match="after the final norm"):
        open_layout("automodel", cache, (1, 2, 5), SIZES)
    change(cache / "manifest.json", target_probs_topk=0)
    with pytest.raises(DatasetError, match="EAGLE-3 cache"):
        open_layout("automodel", cache, None, SIZES)
    raw = write.deepspec(tmp_path / "raw", samples)
    with pytest.raises(TargetError, match="width 32"):
        open_layout("deepspec", raw, None, TargetSizes(blocks=6, hidden_size=64))
    change(raw / "manifest.json", version=1)
    with pytest.raises(DatasetError, match="version 1"):
        open_layout("deepspec", raw, None, SIZES)
    other = write.torchspec(tmp_path / "ts", samples)
    change(other / "dataset.json", version=2)
    with pytest.raises(DatasetError, match="version 1"):
        open_layout("torchspec", other, None, SIZES)


# file, what it says instead
RUBBISH = {
    "deepspec": [{"shards": 5}, {"target_layer_ids": ["a"]}, {"hidden_dtype": ["x"]}],
    "automodel": [{"target_layer_ids": 3}, {"shard_size": -5}, {"num_samples": "many"}],
}


def test_rubbish_in_a_manifest_is_refused(tmp_path, samples):
    for tool, changes in RUBBISH.items():
        root = getattr(write, tool)(tmp_path / tool, samples[:2])
        file = root / "manifest.json"
        right = file.read_text()
        for wrong in changes:
            change(file, **wrong)
            with pytest.raises(DatasetError, match=r"manifest\.json"):
                open_layout(tool, root, None, SIZES)
            file.write_text(right)
    change(tmp_path / "deepspec" / "manifest.json", num_samples=0)
    (tmp_path / "deepspec" / "samples.idx").write_bytes(b"")
    with pytest.raises(MissingError, match="no sample"):
        open_layout("deepspec", tmp_path / "deepspec", None, SIZES)
    other = write.torchspec(tmp_path / "torchspec", samples[:2])
    for data, reason in ((b"\xff\n", "not UTF-8"), (b'{"split":"train","file":"\\u0000"}', "row")):
        (other / "manifest.jsonl").write_bytes(data)
        with pytest.raises(DatasetError, match=reason):
            open_layout("torchspec", other, LAYERS, SIZES)
    third = write.speculators(tmp_path / "speculators", samples[:2])
    (third / "state.json").write_text("{}")
    with pytest.raises(DatasetError, match="cannot be read"):
        open_layout("speculators", third, None, SIZES)


def test_rubbish_in_the_rows_and_files_of_speculators(tmp_path, samples):
    root = write.speculators(tmp_path / "src", samples[:3])
    files = root / "hidden_states"
    table = load_file(files / "hs_0.safetensors")
    whole = table["hidden_states"].view(torch.int16)
    save_file(table | {"hidden_states": whole}, files / "hs_0.safetensors")
    scaled = load_file(files / "hs_1.safetensors") | {"hidden_states_scales": torch.ones(5, 1, 1)}
    save_file(scaled, files / "hs_1.safetensors")
    found = open_layout("speculators", root, (2, 3, 5), SIZES)
    for number, reason in ((0, "dtype I16"), (1, "hidden_states_scales has shape")):
        with pytest.raises(BadRow, match=reason):
            found.tokens(number)
    for name, row in {
        "a": {"input_ids": "abc", "loss_mask": [1]},
        "b": {"input_ids": [[1, 2], [3]], "loss_mask": [1]},
        "c": {"input_ids": [1, 2], "loss_mask": [0.5, 1.0]},
    }.items():
        datasets.Dataset.from_list([row]).save_to_disk(str(tmp_path / name))
        (tmp_path / name / "hidden_states").mkdir()
        shutil.copy(files / "hs_2.safetensors", tmp_path / name / "hidden_states/hs_0.safetensors")
        with pytest.raises(BadRow, match="integers"):
            open_layout("speculators", tmp_path / name, (2, 3, 5), SIZES).tokens(0)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ((1, 1, 2), ConfigError, "named twice"),
        ((0, 7, 2), TargetError, "0 to 6"),
        (None, ConfigError, "which cannot"),
    ],
)
def test_layers_that_cannot_be(tmp_path, samples, given, error, words):
    root = write.speculators(tmp_path / "src", samples[:1])
    sizes = SIZES if given else TargetSizes(blocks=4, hidden_size=32)
    with pytest.raises(error, match=words):
        open_layout("speculators", root, given, sizes)
