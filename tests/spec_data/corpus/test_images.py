"""Images of rows: which are read, and why the others make bad rows."""

import io

import numpy as np
import pytest
from PIL import Image

from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.facts import Layout
from spec_data.corpus.images import ImageFiles
from spec_data.corpus.records import parse_row
from spec_data.models.vision import decode


def picture() -> bytes:
    return _file(Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)))


def asked(*parts) -> dict:
    content = [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]
    answer = {"role": "assistant", "content": "a dog"}
    return {"messages": [{"role": "user", "content": content}, answer]}


def read(row, layout):
    return parse_row(row, source="chats", where="chats:1", layout=layout)


def _file(image: Image.Image, kind: str = "PNG", **given) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **given)
    return file.getvalue()


def _plain(mode: str, size=(8, 6), colour=0) -> Image.Image:
    return Image.new(mode, size, colour)


BAD = {
    "empty": (b"", "cannot be decoded"),
    "no width": (b"P6 0 5 255\n", "cannot be decoded"),
    "stretched": (_file(_plain("RGB", (402, 2))), "at most 1 : 200"),
    "frames": (
        _file(_plain("L"), "GIF", save_all=True, append_images=[_plain("L", colour=255)]),
        "several frames",
    ),
    "pages": (
        _file(_plain("RGB"), "TIFF", save_all=True, append_images=[_plain("RGB", colour=9)]),
        "several frames",
    ),
    "transparent": (_file(_plain("RGBA", colour=(9, 9, 9, 100))), "transparent"),
    "a transparent colour": (_file(_plain("P"), transparency=0), "transparent"),
    "16 bits": (_file(_plain("I;16")), "not of 8 bits"),
    "a bomb": (_file(_plain("1", (9000, 9000))), "9000 x 9000 pixels"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_image_that_is_no_plain_picture_is_a_bad_row(name):
    data, said = BAD[name]
    with pytest.raises(BadRow, match=said):
        ImageFiles().of_row("a.jsonl:1").part({"type": "image", "bytes": data}, "messages[0]")


@pytest.mark.parametrize(
    "data",
    [
        _file(_plain("CMYK"), "JPEG"),
        _file(_plain("RGBA", colour=(1, 2, 3, 255))),
        _file(_plain("L"), "WEBP"),
        _file(_plain("P"), "GIF"),
    ],
)
def test_other_colours_are_read_as_rgb(data):
    assert decode(data).mode == "RGB"
    row = ImageFiles().of_row("a.jsonl:1")
    row.part({"type": "image", "bytes": data}, "messages[0]")
    assert [(p.width, p.height) for p in row.pictures.values()] == [(8, 6)]


def test_what_turns_an_image_is_used():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert decode(_file(_plain("RGB"), "JPEG", exif=exif)).size == (6, 8)


def test_links_and_paths_that_leave_the_folder_are_bad_rows(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (tmp_path / "a.png").write_bytes(picture())
    (folder / "link.png").symlink_to(tmp_path / "a.png")
    (folder / "folder.png").mkdir()
    row = ImageFiles().of_row(f"{folder}/chats.jsonl:3")
    for path in ("link.png", "../a.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png"):
        with pytest.raises(BadRow, match="outside"):
            row.part({"type": "image", "path": path}, "messages[0]")
    for path in ("folder.png", "none.png", "a\0b", "x" * 5000):
        with pytest.raises(BadRow):
            row.part({"type": "image", "path": path}, "messages[0]")
    assert (
        ImageFiles(folder=tmp_path)
        .of_row("elsewhere.jsonl:1")
        .part({"type": "image", "path": "a.png"}, "messages[0]")
    )


@pytest.mark.parametrize(
    ("parts", "column", "said"),
    [
        ([{"type": "image", "path": "a.png", "url": "b.png"}], None, "several images"),
        ([{"type": "image", "path": "a.png", "text": "see"}], None, "an image and a text"),
        ([{"type": "text", "text": "see", "image": "a.png"}], None, "that has 'image'"),
        ([{"type": "image"}], None, "without an image"),
        ([{"type": "image"}, {"type": "text", "text": "<image>"}], ["a.png", "a.png"], "one form"),
        ([{"type": "text", "text": "<image><image>"}], ["a.png"], "more <image>"),
        ([{"type": "video", "path": "a.mp4"}], None, "part of type 'video'"),
    ],
)
def test_parts_that_contradict_each_other_are_bad_rows(tmp_path, parts, column, said):
    (tmp_path / "a.png").write_bytes(picture())
    row = asked(*parts) | ({"images": column} if column else {})
    layout = Layout(images=ImageFiles(folder=tmp_path))
    with pytest.raises(BadRow, match=said):
        read(row, layout)


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_only_users_have_images(tmp_path, role):
    (tmp_path / "a.png").write_bytes(picture())
    row = asked("see")
    row["messages"].insert(1, {"role": role, "content": [{"type": "image", "path": "a.png"}]})
    with pytest.raises(BadRow, match=f"is of the {role} and has an image"):
        read(row, Layout(images=ImageFiles(folder=tmp_path)))


def test_what_a_part_says_beside_its_image_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    parts = [
        {"type": "image", "path": "a.png", "max_pixels": 100, "text": ""},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}},
    ]
    layout = Layout(images=ImageFiles(folder=tmp_path))
    record = read(asked(*parts, "?"), layout)
    assert record.unread == ("messages.content.max_pixels", "messages.content.image_url.detail")
    assert len(record.pictures) == 1
