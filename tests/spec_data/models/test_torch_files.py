"""Files of torch.save from strangers: what is small on disk and large in memory is refused."""

import gzip
import io
import pickle
import sys
import zipfile

import pytest
import torch

from spec_data.conversion.samples import load_table
from spec_data.corpus.bad_rows import BadRow
from spec_data.models.torch_files import BadTensorsError, load_tensors
from spec_data.shards.errors import DraftError
from spec_train.formats.draft_files import read_tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # torch on its own odd tensors
SMALL = torch.arange(6.0).reshape(2, 3)


def sparse():
    return torch.sparse_coo_tensor([[0], [0]], [1.0], (10, 10**9))


def jagged():
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def shared():
    """A hundred tensors that are all of one storage."""
    whole = torch.zeros(1000)
    return {f"t{i}": whole.view(10, 100) for i in range(100)}


HOSTILE = {
    "stride of 0": (
        lambda: SMALL[:1, :1].expand(10**5, 10**5),
        "a repeats numbers by its",
    ),
    "a row again": (lambda: SMALL[:1].expand(10**9, 3), "has 12,000,000,000 bytes, of which the"),
    "overlapping": (lambda: torch.as_strided(torch.zeros(1000), (500, 500), (1, 1)), "repeats"),
    "sparse": (sparse, "a is sparse"),
    "compressed rows": (lambda: sparse().to_sparse_csr(), "a is sparse"),
    "meta": (lambda: torch.empty(10**6, 10**6, device="meta"), "a has no values"),
    "quantised": (lambda: torch.quantize_per_tensor(SMALL, 0.1, 0, torch.qint8), "a is quantised"),
    "nested": (jagged, "of its own form"),
    "one storage": (shared, "more bytes than the file"),
    "in a table": (lambda: {"b": [SMALL[0, :1].expand(10**9)]}, r"a\.b\.0 repeats numbers"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("new", [True, False])
def test_tensors_of_some_bytes_that_are_large_or_strange_are_refused(tmp_path, name, new):
    make, said = HOSTILE[name]
    file, value = tmp_path / "pytorch_model.bin", make()
    table = {"fine": SMALL, "a": value} if name != "one storage" else value
    if name == "nested" and not new:
        return  # torch does not write it
    torch.save(table, file, _use_new_zipfile_serialization=new)
    assert file.stat().st_size < 20_000
    with pytest.raises(BadTensorsError, match=said):
        load_tensors(file)
    with pytest.raises(DraftError, match=rf"pytorch_model\.bin: .*{said}"):
        read_tensors(file)
    with pytest.raises(BadRow, match=said if new else "damaged"):  # the old form has no map
        load_table(file)


class Call:
    """Pickled as a call, which is made when the file is read."""

    def __init__(self, function, *given):
        self.call = function, given

    def __reduce__(self):
        return self.call


def deep():
    value = SMALL
    for _ in range(200):
        value = [value]
    return value


def archive(file, pickled: bytes) -> None:
    """Write what torch.save writes, with another pickle."""
    content = io.BytesIO()
    torch.save(1, content)
    whole = zipfile.ZipFile(content)
    with zipfile.ZipFile(file, "w") as archive:
        for name in whole.namelist():
            archive.writestr(name, pickled if name.endswith("data.pkl") else whole.read(name))


ASKING = {
    "bytearray": lambda: pickle.dumps({"a": Call(bytearray, 1 << 40)}, 2),
    "storage": lambda: pickle.dumps({"a": Call(torch.FloatStorage, 1 << 38)}, 2),
    "tensor": lambda: pickle.dumps({"a": Call(torch.FloatTensor, 1 << 20, 1 << 20)}, 2),
}


@pytest.mark.skipif(sys.platform != "linux", reason="needs a bound of memory")
@pytest.mark.parametrize("name", ASKING)
def test_a_call_that_asks_for_all_memory_is_refused(tmp_path, name):
    file = tmp_path / "pytorch_model.bin"
    archive(file, ASKING[name]())
    assert file.stat().st_size < 5_000
    with pytest.raises(DraftError, match=r"pytorch_model\.bin: "):
        read_tensors(file)
    with pytest.raises(BadRow):
        load_table(file)


def test_a_call_within_the_memory_of_the_machine_is_refused(tmp_path):
    """It has that memory, and would take all of it."""
    file = tmp_path / "pytorch_model.bin"
    archive(file, pickle.dumps({"a": Call(bytearray, 3 << 30)}, 2))
    with pytest.raises(BadTensorsError, match=r"takes more than 1,[\d,]+ bytes of memory"):
        load_tensors(file)


def test_tables_too_deep_to_be_those_of_a_trainer_are_refused(tmp_path):
    """A million of them took hours."""
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": deep()}, file)
    with pytest.raises(BadTensorsError, match="more than 100 tables or lists in one another"):
        load_tensors(file)
    archive(file, b"\x80\x02]" + b"]" * 10**5 + b"a" * 10**5 + b".")
    with pytest.raises(BadTensorsError, match="more than 100 tables or lists in one another"):
        load_tensors(file)


def packed_again(file, content: bytes) -> None:
    """Write an archive of torch.save with its records packed."""
    whole = zipfile.ZipFile(io.BytesIO(content))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in whole.namelist():
            archive.writestr(name, whole.read(name))


def test_packed_files_are_refused_before_they_are_unpacked(tmp_path):
    """torch unpacks them: 200 MB were 200 kB."""
    content, file = io.BytesIO(), tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(10**6)}, content)
    packed_again(file, content.getvalue())
    assert file.stat().st_size < 10**5
    with pytest.raises(DraftError, match=r"it is packed, as torch\.save never does"):
        read_tensors(file)
    sample = tmp_path / "a.ckpt.gz"
    sample.write_bytes(gzip.compress(content.getvalue()))
    with pytest.raises(BadRow, match="it unpacks to more than"):
        load_table(sample)


def test_what_trainers_save_is_read_as_it_is(tmp_path):
    """Slices, transposed and tied tensors, parameters, scalars and other dtypes."""
    head = torch.randn(8, 4)
    table = {
        "embed": head,
        "tied": head,
        "part": head[2:4],
        "turned": head.T,
        "parameter": torch.nn.Parameter(head.clone()),
        "scalar": torch.tensor(2),
        "empty": torch.zeros(0, 4),
        "bf16": head.bfloat16(),
        "float8": head.to(torch.float8_e4m3fn),
        "mask": head > 0,
    }
    for new in (True, False):
        if not new:
            del table["float8"]  # which the old form of files does not have
        file = tmp_path / "pytorch_model.bin"
        torch.save(table, file, _use_new_zipfile_serialization=new)
        found = read_tensors(file)
        assert found.keys() == table.keys()
        for name, value in table.items():
            as_bytes = (t.detach().contiguous().view(-1) for t in (found[name], value))
            assert torch.equal(*(t.view(torch.uint8) if t.numel() else t for t in as_bytes))
