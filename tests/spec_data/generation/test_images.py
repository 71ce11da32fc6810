"""Rows with images: rendered as the processor does, captured as the plain model computes them."""

import base64
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3Processor,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

import spec_data
import spec_train
from spec_data import cli
from spec_data.generation import proof as proof_module
from spec_data.generation import units as units_module
from spec_data.generation.setup import image_files
from spec_data.models.vision import Vision
from spec_data.shards.errors import ConfigError, SpecDataError, TargetError
from spec_data.shards.pictures import images_of
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts.eagle3.options import Eagle3Options

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tokenizer(image: str, specials: list[str], **extra) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens={**extra, **{f"s{n}_token": s for n, s in enumerate(specials)}},
    )
    made.chat_template = _TEMPLATE.replace("IMAGE", image)
    return made


def _llava():
    tok = _tokenizer("<image>", ["<|im_start|>", "<image>"])
    images = LlavaImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=tok,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tok.chat_template,
    )
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = _TEXT | {"model_type": "llama", "vocab_size": len(tok)}
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=processor.image_token_id
    )
    return config, processor


def _gemma3():
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tok = _tokenizer("<start_of_image>", ["<|im_start|>"], **names)
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = Gemma3Processor(
        image_processor=images, tokenizer=tok, image_seq_length=4, chat_template=tok.chat_template
    )
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = _TEXT | {"vocab_size": len(tok), "head_dim": 8, "query_pre_attn_scalar": 8}
    config = Gemma3Config(
        vision_config=vision,
        text_config=text | {"sliding_window": 64},
        mm_tokens_per_image=4,
        image_token_id=tok.image_token_id,
        boi_token_index=tok.boi_token_id,
        eoi_token_index=tok.eoi_token_id,
    )
    return config, processor


FAMILIES = {"llava": _llava, "gemma3": _gemma3}


def save_vision_target(path: Path, family: str):
    """A tiny random target of a family that reads images, with its processor."""
    torch.manual_seed(0)
    config, processor = FAMILIES[family]()
    config.architectures = [type(AutoModelForImageTextToText.from_config(config)).__name__]
    model = AutoModelForImageTextToText.from_config(config).eval()
    for name, value in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):  # zero, so images would change nothing
            torch.nn.init.normal_(value)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return model, processor


def picture(seed: int, width: int = 84, height: int = 56) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def asked(*parts, answer="a dog") -> dict:
    content = [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": answer},
        ]
    }


def write_corpus(folder: Path, rows: list) -> Path:
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("family", ["llava", pytest.param("gemma3", marks=pytest.mark.long)])
def test_states_are_those_of_the_plain_model_with_its_processor(tmp_path, family):
    model, processor = save_vision_target(tmp_path / "target", family)
    (tmp_path / "a.png").write_bytes(picture(1))
    data = "data:image/png;base64," + base64.b64encode(picture(2, 56, 56)).decode()
    rows = [
        asked({"type": "image", "path": "a.png"}, "What?"),
        asked("Here: ", {"type": "image_url", "image_url": {"url": data}}, answer="a cat"),
        asked({"type": "image", "path": "a.png"}, "and", {"type": "image", "url": data}),
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "ho"},
                {"role": "assistant", "content": "there"},
            ]
        },
    ]
    options = spec_data.CaptureOptions(layers=[0, 2, 4], codec="bf16", num_proc=1, dtype="float32")
    out = tmp_path / "data"
    made = spec_data.generate(tmp_path / "target", write_corpus(tmp_path, rows), out, options)
    assert made.sealed and made.documents == len(rows)
    dataset = HiddenStatesDataset(out)
    images = {1: [picture(1)], 2: [picture(2, 56, 56)], 3: [picture(1), picture(2, 56, 56)]}
    assert [len(images_of(dataset).get(one, ())) for one in dataset.doc_ids] == [1, 1, 2, 0, 0]
    for number, row in enumerate(rows):
        files = images.get(number + 1, [])
        decoded = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        chat = [
            m
            | (
                {}
                if isinstance(m["content"], str)
                else {
                    "content": [
                        p if p["type"] == "text" else {"type": "image"} for p in m["content"]
                    ]
                }
            )
            for m in row["messages"]
        ]
        text = processor.tokenizer.apply_chat_template(chat, tokenize=False)
        given = processor(
            text=[text], images=decoded or None, return_tensors="pt", add_special_tokens=False
        )
        document = dataset[number]
        length = len(document["input_ids"])
        assert document["input_ids"].tolist() == given["input_ids"][0, :length].tolist()
        answer = row["messages"][1]["content"] + "<|im_end|>"
        supervised = document["input_ids"][document["loss_mask"].bool()]
        assert processor.tokenizer.decode(supervised) == answer
        with torch.no_grad():
            plain = model(**given, output_hidden_states=True, use_cache=False)
        for layer in (0, 2, 4):
            expected = plain.hidden_states[layer + 1][0, :length]
            stored = document[f"hidden.L{layer}"].float()
            torch.testing.assert_close(stored, expected, rtol=2e-2, atol=2e-2)
    report = spec_data.verify(out, target=tmp_path / "target")
    assert report.ok


def test_bad_images_are_bad_rows_and_named(tmp_path):
    save_vision_target(tmp_path / "target", "llava")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture(1))
    (folder / "half.png").write_bytes(picture(1)[:300])
    (folder / "large.png").write_bytes(picture(3, 400, 300))
    (tmp_path / "outside.png").write_bytes(picture(4))
    good = {"images": ["a.png"], **asked("<image>What?")}
    bad = {
        "is not there": asked({"type": "image", "path": "none.png"}, "?"),
        "cannot be decoded": asked({"type": "image", "path": "half.png"}, "?"),
        "400 x 300 pixels": asked({"type": "image", "path": "large.png"}, "?"),
        "lies outside": asked({"type": "image", "path": "../outside.png"}, "?"),
        "none is fetched": asked({"type": "image", "url": "https://a.b/c.png"}, "?"),
        "not base64": asked({"type": "image", "base64": "!!"}, "?"),
        "no place": {"images": ["a.png"], **asked("What?")},
        "writes 2 of <image>": asked({"type": "image", "path": "a.png"}, "<image>"),
    }
    corpus = write_corpus(folder, [good, *bad.values()])
    options = spec_data.CaptureOptions(
        layers=[0, 2, 4], num_proc=1, max_bad_rows="8", max_image_pixels=10_000
    )
    made = spec_data.generate(tmp_path / "target", corpus, tmp_path / "data", options)
    assert made.documents == 1
    manifest = HiddenStatesDataset(tmp_path / "data").manifest
    examples = manifest.corpus[0].bad_examples
    examples += [
        line for lines in manifest.documents.unrendered_examples.values() for line in lines
    ]
    text = "\n".join(examples)
    assert manifest.documents.bad_rows + sum(manifest.documents.unrendered.values()) == len(bad)
    for said in list(bad)[:5]:
        assert said in text, said


# -- one dataset of both kinds of rows -------------------------------------------------------------

TEXT_ROW = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
}
OPTIONS = spec_data.CaptureOptions(
    layers=[0, 2, 4], codec="bf16", num_proc=1, dtype="float32", max_shard_size="1KB"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a target, a corpus of six rows with images and two of text, and its dataset."""
    folder = tmp_path_factory.mktemp("images")
    save_vision_target(folder / "target", "llava")
    for seed in range(6):
        (folder / f"{seed}.png").write_bytes(picture(seed))
    rows = [
        asked({"type": "image", "path": f"{n}.png"}, "What?", answer=f"it is {n}") for n in range(6)
    ]
    write_corpus(folder, [*rows, TEXT_ROW, asked("ho", answer="there")])
    made = spec_data.generate(folder / "target", folder / "chats.jsonl", folder / "data", OPTIONS)
    assert (made.documents, len(list((folder / "data/shards").iterdir()))) == (8, 4)
    return folder


def sums(folder: Path) -> dict[str, bytes]:
    names = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return {str(n): (folder / n).read_bytes() for n in names if n.name != "README.md"}


def test_equal_questions_about_other_images_are_other_documents_and_no_pixels_stay(made):
    ids = HiddenStatesDataset(made / "data").doc_ids
    assert len(set(ids)) == 8
    files = sums(made / "data")
    held = [name for name in files if "image" in name]
    assert held == ["images.jsonl"]
    stored = b"".join(files.values())
    assert not any(picture(seed)[60:120] in stored for seed in range(6))


def test_a_killed_capture_goes_on_to_the_same_bytes(made, tmp_path, monkeypatch):
    corpus = shutil.copytree(made, tmp_path / "corpus", ignore=shutil.ignore_patterns("data"))
    options = replace(OPTIONS, num_proc=2)
    real, units = units_module.write_shard, []

    def killed(*given):
        if len(units) == 2:
            raise KeyboardInterrupt
        units.append(given)
        return real(*given)

    monkeypatch.setattr(units_module, "write_shard", killed)
    out = tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        spec_data.generate(corpus / "target", corpus / "chats.jsonl", out, options)
    monkeypatch.undo()
    spec_data.generate(corpus / "target", corpus / "chats.jsonl", out, options)
    mine, whole = sums(out), sums(made / "data")
    shards = [name for name in whole if name.startswith("shards/") or name == "images.jsonl"]
    assert {name: mine[name] for name in shards} == {name: whole[name] for name in shards}


def test_a_lost_shard_comes_back_and_another_image_replaces_nothing(made, tmp_path):
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    lost, corpus = folder / "data/shards/unit-00000.arrow", folder / "chats.jsonl"
    before = lost.read_bytes()
    for name in ("shards/unit-00000.arrow", "images.jsonl"):
        (folder / "data" / name).unlink()
    spec_data.generate(folder / "target", corpus, folder / "data", OPTIONS)
    assert lost.read_bytes() == before
    assert sums(folder / "data") == sums(made / "data")
    lost.unlink()
    (folder / "0.png").write_bytes(picture(99))  # of the same size
    with pytest.raises(SpecDataError):
        spec_data.generate(folder / "target", corpus, folder / "data", OPTIONS)
    assert not lost.exists()


def test_verify_says_what_it_cannot_compare(made, capsys):
    code = cli.main(["verify", str(made / "data"), "--target", str(made / "target")])
    out, err = capsys.readouterr()
    assert code == 0
    assert "sampled documents have images, whose pixels are not stored" in out + err


def test_views_and_copies_would_lose_the_images_and_are_refused(made, tmp_path, capsys):
    data = made / "data"
    for args in (
        ["select", str(data), "--where", "length > 1"],
        ["copy", str(data)],
    ):
        assert cli.main([*args, "--out", str(tmp_path / args[0])]) == 2, args
        assert "documents with images" in capsys.readouterr().err
        assert not (tmp_path / args[0]).exists()


def test_eagle3_is_fitted_and_a_mask_of_all_tokens_is_refused(made, tmp_path):
    training = spec_train.Training(
        device="cpu", data=str(made / "data"), out=str(tmp_path / "run"), steps=2, seq_len=64
    )
    spec_train.fit(training, Eagle3Options(ttt_steps=2))
    training = replace(training, out=str(tmp_path / "other"), mask="all")
    with pytest.raises(ConfigError, match="images"):
        spec_train.fit(training, Eagle3Options(ttt_steps=2))


def test_regenerate_drops_no_image(made, tmp_path, capsys):
    corpus, target = str(made / "chats.jsonl"), str(made / "target")
    out = tmp_path / "own.jsonl"
    given = ["--target", target, "--max-new-tokens", "2", "--max-bad-rows", "6"]
    assert cli.main(["regenerate", corpus, "--out", str(out), *given]) == 0
    assert len(out.read_text().splitlines()) == 2  # the rows of text


# -- what is proven --------------------------------------------------------------------------------


def test_a_target_that_ignores_its_images_is_refused_before_the_first_shard(made, tmp_path):
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    weights = folder / "target/model.safetensors"
    tensors = load_file(weights)
    name = next(n for n in tensors if n.endswith("multi_modal_projector.linear_2.weight"))
    tensors[name].zero_()
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(TargetError, match="whatever its images show"):
        spec_data.generate(folder / "target", folder / "chats.jsonl", tmp_path / "new", OPTIONS)
    assert not list((tmp_path / "new").glob("shards/*"))


def test_tokens_that_are_not_the_processors_are_bad_rows(made, tmp_path, monkeypatch):
    real = Vision.ids
    monkeypatch.setattr(Vision, "ids", lambda *given: [*real(*given)[:-1], 3])
    options = replace(OPTIONS, max_bad_rows="6")
    out = tmp_path / "data"
    assert spec_data.generate(made / "target", made / "chats.jsonl", out, options).documents == 2
    found = HiddenStatesDataset(out).manifest.documents.unrendered_examples
    assert "makes other tokens" in str(found)


@pytest.mark.long  # three captures
def test_no_document_ends_within_an_image(made, tmp_path):
    corpus = tmp_path / "chats.jsonl"
    row = {"messages": [TEXT_ROW["messages"][0], {"role": "assistant", "content": "so " * 9}]}
    row["messages"] += asked({"type": "image", "base64": _base64(1)})["messages"]
    corpus.write_text(json.dumps(row) + "\n" + json.dumps(TEXT_ROW) + "\n")
    whole = spec_data.generate(made / "target", corpus, tmp_path / "whole", OPTIONS)
    (placed,), *_ = images_of(HiddenStatesDataset(tmp_path / "whole")).values()
    assert placed.end - placed.start > 1 and not whole.dropped
    for length in (placed.start, placed.end - 1):  # nothing behind an answer is stored
        cut, options = tmp_path / str(length), replace(OPTIONS, max_length=length)
        assert spec_data.generate(made / "target", corpus, cut, options).documents == 2
        assert not images_of(HiddenStatesDataset(cut))
        assert int(HiddenStatesDataset(cut).lengths.max()) <= placed.start


def test_another_processor_does_not_go_on(made, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    monkeypatch.setattr(proof_module, "find_positions", _stop)
    with pytest.raises(KeyboardInterrupt):
        spec_data.generate(folder / "target", folder / "chats.jsonl", tmp_path / "new", OPTIONS)
    monkeypatch.undo()
    file = folder / "target/processor_config.json"
    told = json.loads(file.read_text())
    told["image_processor"]["image_mean"] = [0.1, 0.2, 0.3]
    file.write_text(json.dumps(told))
    with pytest.raises(SpecDataError, match="image processor"):
        spec_data.generate(folder / "target", folder / "chats.jsonl", tmp_path / "new", OPTIONS)


def _stop(*_given):
    raise KeyboardInterrupt


def _base64(seed: int) -> str:
    return base64.b64encode(picture(seed)).decode()


def test_a_template_that_marks_answers_is_refused_for_images(made, tmp_path):
    folder = Path(shutil.copytree(made, tmp_path / "copy"))
    file = folder / "target" / "chat_template.jinja"
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    text = file.read_text().replace("{{ m.content }}", marked)
    file.write_text(text)
    with pytest.raises(SpecDataError, match=r"marks answers with .* not supported with images"):
        spec_data.generate(folder / "target", folder / "chats.jsonl", tmp_path / "new", OPTIONS)


# -- who takes images ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({"vision_config": None}, {}, "texts alone"),
        ({"model_type": "mistral3"}, {}, "only text is read"),
        ({"rope_parameters": {"mrope_section": [2, 3, 3]}}, {}, "M-RoPE"),
        ({}, {"backend": "vllm"}, "--backend vllm"),
        ({}, {"elsewhere": "--engine ray"}, "--engine ray"),
        ({}, {"device_map": "auto"}, "several devices"),
        ({}, {"context_parallel": 2}, "several devices"),
        ({}, {}, ""),
    ],
)
def test_where_images_are_not_taken_the_reason_is_said(change, options, said):
    config = SimpleNamespace(**{"model_type": "llava", "vision_config": {}} | change)
    config.get_text_config = lambda **_: config
    elsewhere = options.get("elsewhere", "")
    own = {name: value for name, value in options.items() if name != "elsewhere"}
    chosen = spec_data.CaptureOptions(**own)
    refused = image_files(SimpleNamespace(model_config=config, options=chosen), elsewhere).refused
    assert said in refused and bool(said) == bool(refused)


@pytest.mark.parametrize(
    ("vision", "given", "said"),
    [
        (None, {"image_folder": "."}, "--image-folder: no images are read: this target"),
        (None, {"max_image_pixels": 1 << 25}, "--max-image-pixels: no images are read"),
        ({}, {"image_folder": "/no/such/folder"}, "there is no such folder"),
    ],
)
def test_an_option_of_images_that_does_nothing_is_refused(vision, given, said):
    config = SimpleNamespace(model_type="llava", vision_config=vision)
    config.get_text_config = lambda **_: config
    setup = SimpleNamespace(model_config=config, options=spec_data.CaptureOptions(**given))
    with pytest.raises(ConfigError, match=said):
        image_files(setup)
