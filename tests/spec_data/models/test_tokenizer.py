"""One place loads tokenizers: which one it takes, whose chat template, and what it refuses."""

import json
import logging
import re

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spec_data.corpus.chat import Renderer
from spec_data.corpus.template import Template
from spec_data.models.tokenizer import load_tokenizer
from spec_data.shards.errors import TargetError
from spec_data.shards.reader import HiddenStatesDataset
from tests.factory import tiny_dataset
from tests.spec_data.corpus.chat_cases import TWO, answer, user
from tests.spec_data.corpus.templates import CHATML, QWEN25, tokenizer
from tests.spec_data.corpus.test_chat import chat


class MistralCommonBackend:
    """As that of transformers: it has no template, and renders no chat that ends with an answer."""

    chat_template = None

    def __call__(self, text, **_):
        return {"input_ids": [1, 2]}

    def get_chat_template(self, *_):
        raise AttributeError("no template")


@pytest.fixture
def saved(tmp_path):
    tokenizer("chatml").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    return tmp_path


def test_beside_a_tekken_file_the_fast_tokenizer_is_used(saved, monkeypatch):
    """Whatever transformers hands out where mistral-common is installed."""
    (saved / "tekken.json").write_text("{}")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: MistralCommonBackend())
    loaded = load_tokenizer(saved)
    assert isinstance(loaded, PreTrainedTokenizerFast) and loaded.chat_template == CHATML
    assert Renderer(loaded).render(chat(*TWO)) == Renderer(tokenizer("chatml")).render(chat(*TWO))


def test_a_dataset_has_the_tokenizer_that_generate_used(saved, tmp_path_factory, monkeypatch):
    dataset = HiddenStatesDataset(tiny_dataset(tmp_path_factory.mktemp("data") / "d", n_docs=2))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: MistralCommonBackend())
    monkeypatch.setattr(HiddenStatesDataset, "target_dir", saved)
    assert isinstance(dataset.tokenizer, PreTrainedTokenizerFast)


def test_a_tekken_file_alone_is_refused_with_what_to_do(saved, monkeypatch):
    (saved / "tekken.json").write_text("{}")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (saved / name).unlink(missing_ok=True)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: MistralCommonBackend())
    with pytest.raises(TargetError, match=r"only tokenizer is tekken\.json") as caught:
        load_tokenizer(saved)
    assert "tokenizer.json" in str(caught.value) and "convert_tekken_tokenizer" in str(caught.value)


def test_what_is_no_tokenizer_is_named_with_what_it_lacks(saved, monkeypatch):
    other = type("Odd", (MistralCommonBackend,), {})
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: other())
    with pytest.raises(TargetError, match=r"its Odd has no .*apply_chat_template.*decode"):
        load_tokenizer(saved)


# -- tokens of chats -------------------------------------------------------------------------------


class Spelled(PreTrainedTokenizerFast):
    """Its chats have [INST] as one token, and texts of them spell it out."""

    def apply_chat_template(self, conversation, tokenize=True, **options):
        text = super().apply_chat_template(conversation, tokenize=False, **options)
        if not tokenize:
            return text.replace("<|im_start|>", "<|im_ start|>")
        return {"input_ids": self(text, add_special_tokens=False)["input_ids"]}


class OnlyPrompts(Spelled):
    def apply_chat_template(self, conversation, **options):
        if conversation[-1]["role"] == "assistant":
            raise ValueError("expected the last role to be user")
        return super().apply_chat_template(conversation, **options)


class OnlyKnownQuestions(Spelled):
    def apply_chat_template(self, conversation, **options):
        if "Qzv7" in str(conversation):
            raise ValueError("needs more")
        return super().apply_chat_template(conversation, **options)


def of_class(kind):
    plain = tokenizer("chatml")
    made = kind(tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>")
    made.chat_template = CHATML
    return made


@pytest.mark.parametrize("kind", [Spelled, OnlyPrompts])
def test_chats_with_other_tokens_than_their_text_are_refused_before_the_first_row(kind):
    with pytest.raises(TargetError, match="makes other tokens of a chat than of its text") as said:
        Template(of_class(kind))
    of_chat, of_text = re.findall(r"\[(\d+), .*?\('(.*?)', ", str(said.value))
    assert of_chat[1] == "<|im_start|>" and of_text[1] != "<|im_start|>", "both are shown"


def test_where_the_trial_cannot_be_rendered_the_first_chat_is_compared():
    renderer = Renderer(of_class(OnlyKnownQuestions))
    with pytest.raises(TargetError, match="makes other tokens"):
        renderer.render(chat(user("a"), answer("b")))


def test_a_tokenizer_without_a_template_still_reads_text():
    plain = tokenizer("chatml")
    plain.chat_template = None
    assert not Template(plain).compared


# -- whose template --------------------------------------------------------------------------------


def without_template(folder):
    (folder / "chat_template.jinja").unlink()


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_the_template_of_a_processor_is_read(saved, file):
    without_template(saved)
    (saved / file).write_text(json.dumps({"chat_template": QWEN25}))
    loaded = load_tokenizer(saved)
    assert loaded.chat_template == QWEN25
    loaded.save_pretrained(saved / "copy")  # as a dataset has it
    assert load_tokenizer(saved / "copy").chat_template == QWEN25


def test_a_processor_with_another_template_is_named(saved, caplog):
    file = saved / "chat_template.json"
    file.write_text(json.dumps({"chat_template": CHATML}))
    with caplog.at_level(logging.WARNING):
        load_tokenizer(saved)
        assert not caplog.records, "the same one"
        file.write_text(json.dumps({"chat_template": QWEN25}))
        assert load_tokenizer(saved).chat_template == CHATML, "as before"
    (record,) = caplog.records
    assert record.getMessage().startswith("warning[processor-template]: ")


@pytest.mark.parametrize("text", ['{"template": "x"}', '{"chat_template": [1]}', "[1]", "{"])
def test_a_damaged_processor_template_is_named(saved, text):
    without_template(saved)
    (saved / "chat_template.json").write_text(text)
    with pytest.raises(TargetError, match=r"chat_template\.json: "):
        load_tokenizer(saved)


def test_templates_in_the_tokenizer_config(saved):
    without_template(saved)
    file = saved / "tokenizer_config.json"
    config = json.loads(file.read_text())
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": QWEN25}]
    for given, read in ((CHATML, CHATML), (named, {"default": CHATML, "tool_use": QWEN25})):
        file.write_text(json.dumps(config | {"chat_template": given}))
        assert load_tokenizer(saved).chat_template == read
    for broken in ([{"template": CHATML}], [CHATML], [{"name": "default"}]):
        file.write_text(json.dumps(config | {"chat_template": broken}))
        with pytest.raises(TargetError, match=r"tokenizer_config\.json: chat_template is a list"):
            load_tokenizer(saved)


def test_named_templates_without_a_default_say_so(saved):
    loaded = load_tokenizer(saved)
    loaded.chat_template = {"tool_use": CHATML}
    renderer = Renderer(loaded)
    tools = [{"type": "function", "function": {"name": "w", "parameters": {}}}]
    assert renderer.render(chat(*TWO, tools=tools)).documents
    with pytest.raises(Exception, match=r"no chat template for it.*tool_use") as caught:
        renderer.render(chat(*TWO))
    assert caught.value.reason == "no-chat-template"
