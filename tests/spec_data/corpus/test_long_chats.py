"""Chats of many turns: what is kept is that of rendering every beginning, without its cost."""

import random

import pytest

from spec_data.corpus import chat as chat_module
from spec_data.corpus.chat import Renderer
from spec_data.corpus.documents import UNSUPERVISED, RenderError
from spec_data.corpus.left_out import left_out
from spec_data.corpus.records import Record
from spec_data.corpus.template import Template
from spec_data.generation.plan import truncate
from tests.spec_data.corpus.templates import TEMPLATES, tokenizer


def long_chat(seed: int, answers: int, thoughts: bool = False) -> Record:
    rng, messages = random.Random(seed), []
    for i in range(answers):
        for role in ("user", "assistant"):
            words = " ".join(rng.choices(["yes", "no", "12", "é", "a b"], k=rng.randint(1, 6)))
            messages.append({"role": role, "content": f"{i} {words}"})
            if thoughts and role == "assistant" and rng.random() < 0.5:
                messages[-1]["reasoning_content"] = words
    return Record(source="s", where="s:1", messages=messages)


def outcome(renderer: Renderer, record: Record, most: int):
    """Return the documents that are kept, how many are not, and what else is counted."""
    result = renderer.render(record)
    documents = [truncate(d, most) for d in result.documents]
    lost = sum(d.dropped == UNSUPERVISED for d in documents) + result.dropped.total()
    kept = [d for d in documents if d.dropped is None]
    return (result.method, kept, lost, result.prompt), result.counts


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("thoughts", [False, True])
def test_long_chats_have_the_documents_of_every_beginning(family, thoughts, monkeypatch):
    monkeypatch.setattr(chat_module, "_MANY", 4)
    tok = tokenizer(family)
    slow = Renderer(tok)
    for seed, answers in enumerate((3, 4, 5, 9, 20)):
        record = long_chat(seed, answers, thoughts)
        if family == "r1" and not thoughts:  # its prompts open a thought
            if answers <= 4:
                with pytest.raises(RenderError):
                    Renderer(tok, longest=20).render(record)
            else:
                assert not Renderer(tok, longest=20).render(record).documents
            continue
        whole = len(slow.render(record).documents[-1].input_ids)
        for most in (whole // 7, whole // 2, whole - 1, whole, 10 * whole):
            found, counts = outcome(Renderer(tok, longest=most), record, most)
            expected, all_counts = outcome(slow, record, most)
            assert found == expected, (seed, answers, most)
            assert counts <= all_counts  # what is behind is not counted
            assert counts == all_counts or (answers > 4 and most < whole)


@pytest.mark.parametrize("mask", ["last-turn", "all", "without-reasoning"])
def test_other_masks_too(mask, monkeypatch):
    monkeypatch.setattr(chat_module, "_MANY", 4)
    for family in ("chatml", "qwen3", "glm"):
        tok, record = tokenizer(family), long_chat(1, 12, True)
        for most in (40, 200):
            slow, fast = (Renderer(tok, mask=mask, longest=n) for n in (None, most))
            assert outcome(fast, record, most)[0] == outcome(slow, record, most)[0]


@pytest.mark.parametrize("family", ["chatml", "qwen3"])
def test_the_renders_of_a_chat_grow_with_what_is_kept_of_it(family, monkeypatch):
    """600 answers once took 1,200 renders of all before each, whose tokens were all in memory."""
    renders, kept = [], []
    applied, made = Template.apply, chat_module.Chat

    def counted(self, *args, **options):
        renders.append(1)
        return applied(self, *args, **options)

    monkeypatch.setattr(Template, "apply", counted)
    monkeypatch.setattr(chat_module, "Chat", lambda *args: kept.append(made(*args)) or kept[-1])
    renderer = Renderer(tokenizer(family), longest=300)
    renders.clear()
    record = long_chat(0, 600, thoughts=family == "qwen3")
    documents = renderer.render(record).documents
    assert documents and len(renders) < 150
    (chat,) = kept
    assert len(chat._rendered) <= 64 and len(chat._texts) <= 64


def test_marks_of_what_is_left_out_are_found_wherever_they_stand():
    """Beside texts that look like the beginning of a mark."""
    texts = ["Qzv", "Qzv1", "Qzv12", "xQzv0mark", "Qzv1mar", "a b", "Qzv3Qzv"]
    messages = [{"role": "user", "content": text} for text in texts]
    assert not left_out(messages, [len(messages)], lambda ms: "".join(m["content"] for m in ms))
    lost = left_out(messages, [len(messages)], lambda ms: "".join(m["content"] for m in ms[1:]))
    assert dict(lost) == {"user messages": 1}
