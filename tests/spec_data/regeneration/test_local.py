"""The local target writes the answers: which prompts, which answers, and what generate finds."""

import json
import re
from types import SimpleNamespace

import datasets
import pytest
import torch
from transformers import AutoTokenizer

from spec_data.cli import main
from spec_data.commands.regenerate import regenerate
from spec_data.models.target_options import LoadOptions
from spec_data.regeneration.conversations import (
    RAN_ON,
    Answer,
    Sampling,
    conversation_of,
    parse_question,
)
from spec_data.regeneration.local import ChatTarget, LocalBackend, TurnRequest
from spec_data.shards.errors import ConfigError, CorpusError
from spec_data.shards.serving import TOKENS_OF
from tests.spec_data.corpus.templates import CHATML
from tests.spec_data.regeneration.tools import (
    answered,
    contents,
    given,
    rows,
    slow_answers,
    write_rows,
)
from tests.spec_data.runs import run, save_target, write_corpus


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "chats.jsonl", 9)


def stops_of(target) -> set[int]:
    return {json.loads((target / "config.json").read_text())["eos_token_id"]}


@pytest.mark.usefixtures("as_text")
def test_answers_are_those_of_the_slow_loop(target, corpus, tmp_path):
    record = answered(corpus, tmp_path / "a.jsonl", target=str(target))
    found, given = rows(tmp_path / "a.jsonl"), rows(corpus)
    assert record["counts"]["written"] == len(found) == len(given) == 9
    for new, old in zip(found, given, strict=True):
        assert contents(new, "user") == contents(old, "user")
        wanted = slow_answers(target, old["messages"], 6, stops_of(target))
        shown = [
            (m["content"], m["finish_reason"]) for m in new["messages"] if m["role"] == "assistant"
        ]
        assert shown == wanted
    reasons = record["counts"]["finish_reasons"]
    assert sum(reasons.values()) == record["counts"]["answers"] == 12


def test_greedy_answers_are_all_first_choices(trained, tmp_path, capsys):
    """The answers of the corpus belong to other questions; the target's own replace them."""
    corpus = trained.corpus("shuffled-questions", trained.shuffled())
    out = tmp_path / "own.jsonl"
    words = ["--target", str(trained.path), "--corpus", str(corpus), "--out", str(out)]
    assert main(["regenerate", *words, "--max-new-tokens", "40", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert "24 read = 24 written + 0 failed + 0 skipped" in shown.out
    following = re.sub(r"\s*\\\n\s*", " ", shown.err)
    assert f"next:  spec-data generate --target {trained.path} --corpus {out}" in following
    assert [contents(r) for r in rows(out)] == [contents(r) for r in trained.rows]
    manifest = run(trained.path, out, tmp_path / "data", layers="0,1", on_policy=True)
    assert manifest.agreement is not None
    found = manifest.agreement.total
    assert found.first_choice == found.tokens > 200
    assert manifest.policy == "on-policy"
    assert manifest.settings["sampling_temperature"] == 0.0  # from the record


def test_a_run_that_is_stopped_holds_answers_of_every_kind(target, tmp_path, monkeypatch):
    """Not the longest prompts first, and not the rows in the order of the corpus."""
    few = [{"prompt": "word " * (1 + n // 2)} for n in range(80)]  # sorted, as by source
    corpus, asked = write_rows(tmp_path / "c.jsonl", few), []
    generate = LocalBackend._generate

    def stopped(self, batch):
        asked.append([int(q.conversation.record.where.rpartition(":")[2]) - 1 for q in batch])
        if len(asked) == 8:
            raise KeyboardInterrupt
        return generate(self, batch)

    monkeypatch.setattr(LocalBackend, "_generate", stopped)
    given = {"target": str(target), "max_new_tokens": 1, "batch_size": 4}
    with pytest.raises(KeyboardInterrupt):
        answered(corpus, tmp_path / "a.jsonl", **given)
    first = [number for batch in asked[:4] for number in batch]
    assert min(first) < 27 and max(first) > 53 and any(27 <= n <= 53 for n in first)
    spread = [max(batch) - min(batch) for batch in asked]  # of similar lengths, all the same
    assert max(spread) < 40
    again, asked[:] = list(asked), []
    with pytest.raises(KeyboardInterrupt):
        answered(corpus, tmp_path / "b.jsonl", **given)
    assert asked == again


def test_the_head_sees_contiguous_states(target, corpus, tmp_path, monkeypatch):
    """Of a slice of the prompts' states, torch would copy the head's weight once per prompt."""
    seen, linear = [], torch.nn.functional.linear

    def watched(states, weight, bias=None):
        if weight.shape[0] == vocabulary and states.shape[0] > 1:
            seen.append(states.is_contiguous())
        return linear(states, weight, bias)

    vocabulary = json.loads((target / "config.json").read_text())["vocab_size"]
    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    answered(corpus, tmp_path / "a.jsonl", target=str(target))
    assert len(seen) > 5 and all(seen)


@pytest.mark.usefixtures("as_text")
def test_the_last_turn_only(target, corpus, tmp_path):
    answered(corpus, tmp_path / "a.jsonl", target=str(target), turns="last")
    for new, old in zip(rows(tmp_path / "a.jsonl"), rows(corpus), strict=True):
        assert contents(new)[:-1] == contents(old)[:-1]
        weights = [m.get("weight", 1) for m in new["messages"] if m["role"] == "assistant"]
        assert weights == [0] * (len(weights) - 1) + [1]
    manifest = run(target, tmp_path / "a.jsonl", tmp_path / "data")
    assert manifest.documents.rendering["answers of weight 0, not supervised"] == 3


def test_turns_without_a_stored_answer_are_answered_with_the_last_one():
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked.append({"role": "user", "content": "c"})
    for row, slots in (
        ({"turns": ["a", "b", "c"]}, (1, 3, 5)),
        ({"messages": asked}, (3,)),
        ({"messages": [*asked, {"role": "assistant", "content": "d"}]}, (3,)),
    ):
        record = parse_question(row, source="f", where="f:1")
        assert conversation_of(record, "last").slots == slots


@pytest.mark.usefixtures("as_text")
def test_questions_alone_and_what_is_left_out(target, tmp_path):
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    corpus = write_rows(
        tmp_path / "c.jsonl",
        [
            {"prompt": "why"},
            {"turns": ["first", "second"]},
            {"messages": [question, answer, question | {"content": "r"}]},
            {"messages": [question, answer | {"weight": 0}, question | {"content": "s"}, answer]},
            {"messages": [question, answer]},
            {"messages": [question, answer | {"content": "b"}]},  # the same question
            {"messages": [answer]},
            {"text": "plain"},
            {"messages": [question | {"content": "long " * 600}, answer]},
            {"nothing": 1},
        ],
    )
    record = answered(corpus, tmp_path / "a.jsonl", target=str(target), max_bad_rows="5")
    counts = record["counts"]
    assert (counts["read"], counts["written"], counts["failed"]) == (10, 5, 0)
    assert counts["skipped"] == {
        "bad": 1,
        "duplicate": 1,
        "no-assistant-turn": 2,
        "prompt-too-long": 1,
    }
    found = rows(tmp_path / "a.jsonl")
    assert [len(r["messages"]) for r in found] == [2, 4, 4, 4, 2]
    assert found[3]["messages"][1] == answer | {"weight": 0}
    assert counts["answers"] == 1 + 2 + 2 + 1 + 1


@pytest.mark.usefixtures("as_text")
def test_tools_and_template_kwargs_of_a_row_are_kept(tmp_path):
    target = save_target(tmp_path / "t", template="qwen3")
    tools = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    corpus = write_rows(tmp_path / "c.jsonl", [row])
    answered(corpus, tmp_path / "a.jsonl", target=str(target), dtype="float32")
    (found,) = rows(tmp_path / "a.jsonl")
    assert found["tools"] == tools and found["chat_template_kwargs"] == row["chat_template_kwargs"]


IN_PARTS = CHATML.replace(
    "{{- '<|im_start|>' + message.role",
    "{%- if message.role == 'assistant' %}{{- raise_exception('give its parts') }}{%- endif %}\n"
    "{{- '<|im_start|>' + message.role",
)

STRIPPED = CHATML.replace(
    "+ message.content +",
    "+ (message.content[-1:] if message.role == 'assistant' else message.content) +",
)


@pytest.mark.parametrize("template", ["r1", "in parts", "stripped"])
def test_answers_that_the_template_cannot_render_are_written_as_tokens(tmp_path, template):
    """R1 drops the thought that its prompt opens, Gemma 4 any, gpt-oss refuses channels."""
    target = save_target(tmp_path / "t", template="r1" if template == "r1" else "chatml")
    if template != "r1":
        text = IN_PARTS if template == "in parts" else STRIPPED
        (target / "chat_template.jinja").write_text(text)
    corpus = write_corpus(tmp_path / "c.jsonl", 9)
    record = answered(corpus, tmp_path / "a.jsonl", target=str(target), max_new_tokens=12)
    written, answers = record["counts"]["written"], record["counts"]["answers"]
    # without its parts, an answer is no history
    assert (written, answers) == ((6, 6) if template == "in parts" else (9, 12))
    note = "conversations written as token ids: their text would become other tokens"
    assert record["counts"]["notes"] == {note: written}
    found, tok = rows(tmp_path / "a.jsonl"), AutoTokenizer.from_pretrained(target)
    assert len(found) == answers
    first = next(r for r in found if r["id"] == found[0]["id"])
    prompt = tok.apply_chat_template(
        [{"role": "user", "content": f"question {int(template == 'in parts')}"}],
        add_generation_prompt=True,
    )["input_ids"]
    assert first["input_ids"][: len(prompt)] == prompt
    assert sum(sum(r["loss_mask"]) for r in found) == record["counts"]["tokens"]
    manifest = run(target, tmp_path / "a.jsonl", tmp_path / "data", on_policy=True)
    assert manifest.agreement is not None
    agreement = manifest.agreement.total
    assert agreement.first_choice == agreement.tokens == record["counts"]["tokens"]


def test_the_dataset_has_the_tokens_that_the_target_wrote(target, corpus, tmp_path):
    """A random target writes hardly a token that the tokenizer would make of its text."""
    record = answered(corpus, tmp_path / "a.jsonl", target=str(target), max_new_tokens=12)
    assert any("input_ids" in row for row in rows(tmp_path / "a.jsonl"))
    manifest = run(target, tmp_path / "a.jsonl", tmp_path / "data", on_policy=True)
    assert manifest.agreement is not None
    agreement = manifest.agreement.total
    assert agreement.first_choice == agreement.tokens == record["counts"]["tokens"]


@pytest.mark.parametrize(
    ("text", "other", "as_text"),
    [
        ("hello there", (), True),
        ("hello there \n", (), False),  # Gemma's answers often end so; its template trims them
        (" hello there", (), False),
        ("hello", ("h", "ello"), False),
    ],
)
def test_an_answer_is_text_if_it_becomes_the_same_tokens(tmp_path, text, other, as_text):
    path = str(save_target(tmp_path / "t", template="llama3"))
    chat = ChatTarget(path, Sampling(0.0, 1.0, None, 64, 0, {}), LoadOptions(), weights=False)
    row = {"messages": [{"role": "user", "content": "hello"}]}
    asked = conversation_of(parse_question(row, source="f", where="f:1"), "all")
    prompt, _ = chat.prompt(asked, [])
    tokens = [
        token
        for part in other or (text, "<|eot_id|>")
        for token in chat.tokenizer(part, add_special_tokens=False)["input_ids"]
    ]
    tokens += chat.tokenizer.convert_tokens_to_ids(["<|eot_id|>"]) if other else []
    answer = Answer(
        message={"content": text},
        finish="stop",
        tokens=len(tokens),
        prompt_tokens=len(prompt),
        ids=[*prompt, *tokens],
    )
    assert chat.can_render(asked, [answer]) is as_text


@pytest.mark.usefixtures("as_text")
def test_truncated_answers_are_marked(target, corpus, tmp_path):
    record = answered(corpus, tmp_path / "a.jsonl", target=str(target), max_new_tokens=2)
    cut = record["counts"]["finish_reasons"]["length"]
    assert cut == 12
    manifest = run(target, tmp_path / "a.jsonl", tmp_path / "data")
    rendering = manifest.documents.rendering
    shown = rendering["answers cut at a limit of tokens, their end not supervised"]
    assert shown + rendering.get("empty answers, not supervised", 0) == cut


@pytest.mark.usefixtures("as_text")
def test_a_prompt_near_the_end_of_the_context_cuts_no_other_answer(target, corpus, tmp_path):
    short = answered(corpus, tmp_path / "short.jsonl", target=str(target))
    context = json.loads((target / "config.json").read_text())["max_position_embeddings"]
    question = {"role": "user", "content": "a" * (context - 30)}
    template = AutoTokenizer.from_pretrained(target).apply_chat_template
    taken = len(template([question], add_generation_prompt=True)["input_ids"])
    question["content"] += "a" * (context - 2 - taken)  # leaves room for two tokens
    given = [*rows(corpus), {"messages": [question, {"role": "assistant", "content": "."}]}]
    both = write_rows(tmp_path / "both.jsonl", given)
    record = answered(both, tmp_path / "a.jsonl", target=str(target), batch_size=16)
    *found, last = rows(tmp_path / "a.jsonl")
    assert [r["messages"] for r in found] == [r["messages"] for r in rows(tmp_path / "short.jsonl")]
    assert record["counts"]["tokens"] - short["counts"]["tokens"] in (1, 2)
    assert len(contents(last)) == 1


def test_a_target_whose_padding_leaks_gets_prompts_of_one_length(
    target, corpus, tmp_path, monkeypatch, caplog
):
    plain = tmp_path / "a.jsonl"
    answered(corpus, plain, target=str(target))
    widths, generate = [], LocalBackend._generate
    first = LocalBackend._first_logits

    def leaking(self, ids, mask):
        found = first(self, ids, mask)
        return found + (mask == 0).sum(-1, keepdim=True) * torch.randn(found.shape[-1])

    def counted(self, batch):
        widths.append({len(q.prompt) for q in batch})
        return generate(self, batch)

    monkeypatch.setattr(LocalBackend, "_first_logits", leaking)
    monkeypatch.setattr(LocalBackend, "_generate", counted)
    answered(corpus, tmp_path / "b.jsonl", target=str(target))
    assert widths and all(len(lengths) == 1 for lengths in widths)
    assert "warning[padding]: a padded prompt changes this target's logits" in caplog.text
    assert (tmp_path / "b.jsonl").read_bytes() == plain.read_bytes()


def test_padding_is_tried_on_the_shortest_prompt_whatever_room_the_others_have(target, monkeypatch):
    """Those with the least room are the longest, and come last."""
    tried, sizes = [], {50: 100, 10: 100, 950: 74, 1000: 24}
    conversation = SimpleNamespace(id="c", slots=[0])
    backend = LocalBackend(
        ChatTarget(str(target), Sampling(0.0, 1.0, None, 100, 0, {}), LoadOptions(), weights=False),
        *(8, LoadOptions()),
    )
    monkeypatch.setattr(LocalBackend, "_padding_is_exact", lambda _, batch: tried.append(batch))
    backend._batches([TurnRequest(conversation, 0, [1] * n, k, True) for n, k in sizes.items()])
    assert [len(tried[0][i].prompt) for i in (0, -1)] == [1000, 10]


BAD = [
    ({"out": "a.txt"}, r"ends in \.jsonl"),
    ({"out": "chats.jsonl"}, "would be read as corpus"),
    ({"corpus": "set@train", "out": "set/a.jsonl"}, "would be read as corpus"),
    ({"out": "no/a.jsonl"}, "in an existing directory"),
    ({"device": "cuda:99"}, "not usable on this machine"),
    ({"target": None}, "who answers"),
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 0.0}, "top.p"),
    ({"top_p": 0.9}, "--top-p 0.9 changes nothing at --temperature 0"),
    ({"top_k": 5}, "--top-k 5 changes nothing"),
    ({"batch_size": 0}, "batch.size 0"),
    ({"server_model": "m"}, "add that option"),
    ({"server": ("localhost:8000",)}, "expected a URL"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input_is_refused_before_anything_is_written(
    target, corpus, tmp_path, monkeypatch, changes, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=message):
        answered(**{"corpus": corpus, "out": "a.jsonl", "target": str(target)} | changes)
    assert sorted(tmp_path.iterdir()) == before


# --- what generate makes of the record ---


def test_on_policy_is_checked_against_the_record(target, trained, corpus, tmp_path):
    out = tmp_path / "own" / "own.jsonl"
    out.parent.mkdir()
    answered(corpus, out, target=str(trained.path), temperature=0.5)
    with pytest.raises(ConfigError, match=r"was not written by this target.*\n.*weights: sha256"):
        run(target, out, tmp_path / "data", on_policy=True)
    with pytest.raises(ConfigError, match=r"own\.jsonl\.sampling\) were sampled at 0\.5"):
        given = {"on_policy": True, "sampling_temperature": 0.7, "layers": "0,1"}
        run(trained.path, out, tmp_path / "data", **given)
    # a directory of such files is no way round it
    with pytest.raises(ConfigError, match=r"was not written by this target.*\n.*weights: sha256"):
        run(target, tmp_path / "own", tmp_path / "data", on_policy=True)
    with pytest.raises(ConfigError, match=r"chat template kwargs: \{\} there, \{'a': 1\} here"):
        given = {"on_policy": True, "chat_template_kwargs": '{"a": 1}', "layers": "0,1"}
        run(trained.path, out, tmp_path / "data", **given)
    (out.parent / "own.jsonl.sampling").write_text("{")
    with pytest.raises(CorpusError, match=r"own\.jsonl\.sampling: not valid JSON"):
        run(trained.path, out, tmp_path / "data", layers="0,1", on_policy=True)


def test_answers_that_run_on_behind_the_templates_end_are_named(tmp_path, caplog):
    """A longer limit helps nothing where generation does not stop at the end of an answer."""
    target = save_target(tmp_path / "target", template="odd-end")
    corpus = write_rows(tmp_path / "c.jsonl", [{"prompt": f"question {i}"} for i in range(3)])
    made = regenerate(**given(corpus, tmp_path / "own.jsonl", target=str(target)))
    (line,) = [r.message for r in caplog.records if "warning[stop-token]" in r.message]
    assert "<|stop|>" in line
    cut = made.finish_reasons.get("length", 0)
    assert cut and made.notes[RAN_ON] == cut
    said = " ".join(str(made).split())
    assert "Raise --max-new-tokens" not in said and RAN_ON in said


def test_rows_of_token_ids_say_what_rendered_their_prompts(tmp_path):
    """As rows of text do: half of the chats have a system message, tools and an own kwarg."""
    template = "{{ 'deep ' if deep }}{{ 'tools ' if tools }}" + CHATML
    asked = [{"role": "user", "content": "question {i}"}, {"role": "assistant", "content": "x"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chats = []
    for i in range(12):
        messages = [{**m, "content": m["content"].format(i=i)} for m in asked]
        row = {"messages": messages}
        if i % 2:
            system = [{"role": "system", "content": "You are short."}]
            row = {"messages": system + messages, "tools": [tool]}
            row["chat_template_kwargs"] = {"deep": True}
        chats.append(row)
    corpus = write_rows(tmp_path / "c.jsonl", chats)
    target = save_target(tmp_path / "t")
    (target / "chat_template.jinja").write_text(template)
    answered(corpus, tmp_path / "a.jsonl", target=str(target), max_new_tokens=12)
    found = rows(tmp_path / "a.jsonl")
    assert all("input_ids" in row for row in found)
    whole = run(target, tmp_path / "a.jsonl", tmp_path / "data", on_policy=True).identity
    assert whole["template_kwargs_used"] == {'{"deep": true}': 6, "{}": 6}
    assert whole["system_messages"] == {"": 6, "You are short.": 6}
    assert whole["tools_used"] == {"": 6, "tools": 6}
    parquet = tmp_path / "a.parquet"  # with a null for every key that a row lacks
    datasets.Dataset.from_list(found[::-1]).to_parquet(parquet)
    again = run(target, parquet, tmp_path / "again", on_policy=True).identity
    assert all(again[name] == whole[name] for name in TOKENS_OF)
    bare = write_rows(tmp_path / "b.jsonl", [{"input_ids": row["input_ids"]} for row in found])
    assert "tools_used" not in run(target, bare, tmp_path / "bare").identity, "nothing is invented"
