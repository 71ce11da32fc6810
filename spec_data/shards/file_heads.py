"""What a file is instead of what its name says, by its first bytes.

A clone without Git LFS, a login page saved as a file, and a download that broke off all leave files
that no reader understands. Each reader would give another wrong cause. One look at the first bytes
names the right one, for every kind of file.
"""

from pathlib import Path

from spec_data.shards.errors import SpecDataError
from spec_data.shards.regular_files import special_kind

_READ, _SHOWN = 40, 4  # bytes; names in a message
_AGAIN = "download it again"
_LFS = "a Git LFS pointer and not the file itself; run `git lfs pull` in the clone it is from"
_ANNEX = "a git-annex pointer and not the file itself; run `git annex get` in the clone it is from"
_PAGE = f"an HTML page, which a server sent instead of the file (an error or a login); {_AGAIN}"
_ANSWER = f"an error message of a server instead of the file; {_AGAIN}"
_TEXTS = (
    (b"version https://git-lfs.github.com/", _LFS),
    (b"version https://hawser.github.com/", _LFS),  # its first releases
    (b"/annex/objects/", _ANNEX),
    (b"../.git/annex/objects/", _ANNEX),
    (b"<!doctype html", _PAGE),
    (b"<html", _PAGE),
    (b"<?xml", _ANSWER),
    (b"entry not found", _ANSWER),
    (b"repository not found", _ANSWER),
    (b"access to model", _ANSWER),
    (b"access to dataset", _ANSWER),
    (b"invalid username or password", _ANSWER),
    (b"invalid credentials", _ANSWER),
    (b"404: not found", _ANSWER),
)
"""What a file never begins with, in small letters, and what it is."""
_FORMATS = (
    (b"GGUF", "in the GGUF form of llama.cpp", (".gguf",)),
    (b"PK\x03\x04", "a zip archive", (".zip", ".bin", ".pt", ".pth", ".ckpt", ".npz")),
    (b"\x1f\x8b", "packed with gzip", (".gz", ".tgz")),
    (b"BZh", "packed with bzip2", (".bz2",)),
    (b"\x28\xb5\x2f\xfd", "packed with zstd", (".zst",)),
    (b"PAR1", "a Parquet file", (".parquet",)),
    (b"ARROW1", "an Arrow file", (".arrow",)),
    (b"\x89HDF", "an HDF5 file", (".h5", ".hdf5")),
    (b"\x80\x02", "a pickle of torch.save", (".bin", ".pt", ".pth", ".ckpt", ".pkl")),
)
"""How files of other formats begin, what they are, and the suffixes with which that is right."""


_TEXTS_OF_MODELS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
_MOST_TEXT = 1 << 29  # bytes of one of them: a tokenizer has some 30 MB
_SMALL = (*_TEXTS_OF_MODELS, ".safetensors", ".bin", ".arrow")


def no_data(path: Path) -> str | None:
    """Return what a file is, in words, if no file of data begins like that; else None.

    A .txt file may be a page or a message. Pointers of LFS and git-annex are none of a file.
    """
    head = _head(path).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for start, what in _TEXTS:
        if head.startswith(start) and (what in (_LFS, _ANNEX) or path.suffix != ".txt"):
            return f"this is {what}"
    return None


def check_files(directory: Path, error: type[SpecDataError]) -> None:
    """Raise `error` if files of a directory (a config, weights, shards) are `no_data` or no files.

    A library would take such a template for a template, or name another cause.
    """
    files = sorted(p for p in directory.iterdir() if p.suffix in _SMALL and not p.is_dir())
    found = [(file, what) for file in files if (what := _no_file(file) or no_data(file))]
    if found:
        others = [file.name for file, _ in found[1:]]
        also = f" (so are {', '.join(others[:_SHOWN])})" if others else ""
        raise error(f"{found[0][0]}: {found[0][1]}{also}")


def _no_file(path: Path) -> str | None:
    """Return why a path is no file of a model or a dataset that can be opened, whatever it holds.

    Libraries would wait for a pipe for ever, and read a text of any size into memory.
    """
    if kind := special_kind(path):
        return f"this is {kind}, not a file"
    size = path.stat().st_size if path.suffix in _TEXTS_OF_MODELS and path.is_file() else 0
    return f"{size:,} bytes, which no such file has" if size > _MOST_TEXT else None


def instead(path: Path, otherwise: str) -> str:
    """Return what a file that could not be read is, in words; `otherwise`, if that is not known.

    Nothing is known of a file that is not here, as one of a remote dataset.
    """
    if kind := special_kind(path):
        return f"this is {kind}, not a file"
    if not path.is_file():
        return otherwise
    head = _head(path)
    if what := no_data(path):
        return what
    if not head:
        return f"empty (0 bytes); {_AGAIN}"
    if not head.strip(b"\0"):
        return f"zeros at its start, as a download that broke off leaves it; {_AGAIN}"
    for start, what, suffixes in _FORMATS:
        if head.startswith(start) and path.suffix not in suffixes:
            return f"this is {what}, under the name of another kind of file"
    if head[4:10] == b'\0\0\0\0{"' and path.suffix != ".safetensors":
        return "this is a safetensors file; give it the suffix .safetensors"
    return otherwise


def _head(path: Path) -> bytes:
    """Return the first bytes of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_READ)
    except OSError:
        return b""
