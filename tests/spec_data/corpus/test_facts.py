"""What a row says beside its text is used, refused or named."""

import csv
import json
from copy import copy

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts import corpus_facts
from spec_data.corpus.bad_rows import BadRow, parse_limit
from spec_data.corpus.chat import Renderer
from spec_data.corpus.documents import RenderError
from spec_data.corpus.facts import FACTS, Layout, meaning_of, parse_columns
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.records import parse_prompt, parse_row
from spec_data.corpus.template_keys import layout_of, message_keys
from spec_data.shards.errors import ConfigError, CorpusError
from tests.spec_data.corpus.reading import read, write_jsonl
from tests.spec_data.corpus.templates import CHATML, tokenizer

ALL = parse_limit("100%")
U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TWO = [U, A, {"role": "user", "content": "more"}, {"role": "assistant", "content": "b"}]


def template(text):
    tok = copy(tokenizer("chatml"))
    tok.chat_template = text
    return tok


def parse(row, layout=None, **more):
    return parse_row(row, source="f", where="f:1", **({"layout": layout} if layout else {}), **more)


def weights(row):
    return [m.get("weight") for m in parse(row).messages]


def test_the_page_lists_the_table():
    """After a change of facts.toml: python scripts/corpus_facts.py writes it."""
    text = corpus_facts.PAGE.read_text(encoding="utf-8")
    assert corpus_facts.page(text) == text


def test_a_name_has_one_meaning():
    for table in (FACTS.column, FACTS.key):
        names = [n for fact in table for n in fact.names if n != "input"]
        assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


# -- flags of messages -----------------------------------------------------------------------------

OFF = (0, 0.0, False, "false", "False", "0", "no")
FLAGS = ("weight", "loss", "loss_mask", "loss_weight", "train", "training", "trainable", "learn")


@pytest.mark.parametrize(
    "key",
    [*FLAGS, "learnable", "supervised", "loss_scale", "is_supervised", "is_train", "has_loss"],
)
def test_a_flag_of_a_message_under_any_name_and_in_any_form(key):
    for value in OFF:
        assert weights({"messages": [U, A | {key: value}]})[1] == 0
    for value in (1, 1.0, True, "true", "1", None):
        assert weights({"messages": [U, A | {key: value}]})[1] in (None, 1, 1.0, True)


def test_a_flag_that_means_the_opposite_and_one_that_may_mean_either():
    assert weights({"messages": [U, A | {"masked": True}]}) == [None, 0]
    assert weights({"messages": [U, A | {"masked": False}]}) == [None, None]
    for flags in ({"mask": 1}, {"mask": "x"}):
        with pytest.raises(BadRow, match=r"mask of messages.1. can mean learned or masked"):
            parse({"messages": [U, A | flags]})
    with pytest.raises(BadRow, match=r"train of messages.1. is 'maybe', not 0 or 1"):
        parse({"messages": [U, A | {"train": "maybe"}]})
    with pytest.raises(BadRow, match=r"loss_mask of messages.1. is a list"):
        parse({"messages": [U, A | {"loss_mask": [0, 1]}]})


def test_weights_between_0_and_1_count_as_1_and_are_named(tmp_path, caplog):
    rows = [{"messages": [U, A | {"weight": 0.5}]}, {"messages": TWO, "loss_weight": 0.3}]
    records, (report,) = read(write_jsonl(tmp_path / "a.jsonl", rows))
    assert records[0].messages[1]["weight"] == 0.5 and records[1].learned
    assert sorted(report.notes.values()) == [1, 1]
    assert caplog.text.count("warning[flags]") == 2
    record = parse({"messages": [U | {"train": 1}, A]})
    assert record.notes == ("messages.train 1 at other roles: only answers are learned",)


@pytest.mark.parametrize("name", ["loss_mask", "weights", "train", "loss_weights", "trainable"])
def test_flags_beside_messages_are_of_messages_or_of_answers(name):
    for flags in ([0, 0, 0, 1], [None, 0.0, None, 1.0], [False, True], ["0", "1"]):
        assert weights({"messages": TWO, name: flags})[1::2] == [0, None], flags
    with pytest.raises(BadRow, match=rf"{name} has 3 flags for 4 messages \(2 of answers\)"):
        parse({"messages": TWO, name: [0, 0, 1]})
    with pytest.raises(BadRow, match=f"{name} holds 'x', not 0 or 1"):
        parse({"messages": TWO, name: ["x", 1]})
    assert weights({"prompt": "q", "completion": "a", name: [0, 0]})[1] == 0
    assert weights({"messages": TWO, "masked": [1, 0]})[1::2] == [0, None]
    system = {"messages": TWO, "system": "s", name: [0, 0, 0, 1]}  # flags are of the messages there
    assert weights(system)[2::2] == [0, None]


@pytest.mark.parametrize(
    "row",
    [
        *({"messages": TWO, name: value} for name in ("weight", "train") for value in OFF[:4]),
        {"messages": TWO, "masked": True},
        {"prompt": "q", "completion": "a", "label": False},
        {"prompt": "q", "completion": "a", "label": "False"},
        {"prompt": "q", "completion": "a", "label": 0},
        {"messages": TWO, "kto_tag": False},
        {"text": "some text", "train": False},
        {"input_ids": [1, 2, 3], "weight": 0},
    ],
)
def test_a_row_that_says_so_is_not_learned(row):
    record = parse(row)
    assert not record.learned and not record.unread
    with pytest.raises(RenderError, match="a flag of the row") as caught:
        Renderer(tokenizer("chatml")).render(record)
    assert caught.value.reason == "nothing-supervised" and not caught.value.broken


def test_labels_of_classifiers_are_no_flags():
    assert parse({"text": "a", "label": 0}).learned
    assert parse({"input_ids": [1, 2], "label": 0}).learned
    assert parse({"prompt": "q", "completion": "a", "label": 3}).learned
    assert parse({"prompt": "q", "completion": "a", "label": True}).notes == ()


def test_parts_of_messages_that_are_left_out_are_refused():
    parts = [{"begin_offset": 0, "end_offset": 0, "train": False}]
    with pytest.raises(BadRow, match=r"train_detail of messages.1. leaves out parts"):
        parse({"messages": [U, A | {"train_detail": parts}]})
    assert parse({"messages": [U, A | {"train_detail": [{"train": True}]}]})
    with pytest.raises(BadRow, match="mask is 1: 1 can mean learned or masked"):
        parse({"messages": TWO, "mask": 1})
    assert parse({"messages": TWO, "mask": "User"}).unread == ()  # NeMo's


# -- masks and packs of tokens ---------------------------------------------------------------------

IDS = [5, 6, 7, 8, 5, 6, 9, 10]


@pytest.mark.parametrize(
    ("more", "mask"),
    [
        ({"assistant_masks": [0, 0, 1, 1]}, [0, 0, 1, 1]),
        ({"completion_mask": [0, 1, 1, 1], "assistant_masks": [0, 0, 1, 1]}, [0, 0, 1, 1]),
        ({"loss_mask": [0.0, 1.0, 1.0, 1.0]}, [0, 1, 1, 1]),
        ({"loss_weights": [False, True, True, True]}, [0, 1, 1, 1]),
        ({"response_mask": [0, 1, 1, 0]}, [0, 1, 1, 0]),
        ({"prompt_mask": [1, 1, 0, 0]}, [0, 0, 1, 1]),
        ({"prompt_length": 3}, [0, 0, 0, 1]),
        ({"labels": [-100, -100, 7, 8]}, [0, 0, 1, 1]),
        ({"labels": [-100, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}, [0, 0, 1, 1]),
        ({"special_tokens_mask": [1, 0, 0, 1], "token_type_ids": [0, 0, 0, 0]}, None),
        ({"tokens": ["a", "b", "c", "d"], "length": 4, "logprobs": [0.1, 0.2, 0.3, 0.4]}, None),
    ],
)
def test_masks_of_tokens_under_any_name(more, mask):
    record = parse({"input_ids": IDS[:4], **more})
    assert (record.input_ids, record.loss_mask) == (IDS[:4], mask) and not record.unread


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"assistant_masks": [0, 1]}, "assistant_masks has 2 values, input_ids 4"),
        ({"loss_mask": [0, 1, 2, 1]}, r"loss_mask\[2\] is 2: .* there are no weights"),
        ({"loss_weights": [0, 0.5, 1, 1]}, r"loss_weights\[1\] is 0.5"),
        ({"prompt_length": 9}, "prompt_length is 9, no number of the 4 tokens"),
        ({"prompt_length": 1, "attention_mask": [0, 1, 1, 1]}, "counts the padding"),
        ({"my_mask": [0, 0, 1, 1]}, "my_mask has a value for each token .* not understood"),
        ({"mask": [0, 0, 1, 1]}, "mask has a value for each token"),
        ({"roles": ["u", "u", "a", "a"]}, "roles has a value for each token"),
        ({"position_ids": [[0, 1], [2, 3], [0, 1], [2, 3]]}, "position_ids is not a list of int"),
    ],
)
def test_masks_that_are_not_understood_make_the_row_bad(more, why):
    with pytest.raises(BadRow, match=why):
        parse({"input_ids": IDS[:4], **more})


@pytest.mark.parametrize(
    "name", ["num_tokens", "n_tokens", "length", "pack_lens", "sample_count", "offset_index"]
)
def test_lists_that_may_divide_a_row_of_ids_make_it_bad(name, tmp_path):
    """Lengths or bounds of parts, also under names that are ignored: no document is two."""
    for values in ([4, 4], [1, 2, 5], [0, 4, 8], [4, 8]):
        row = {"input_ids": IDS, name: values}
        with pytest.raises(BadRow, match=f"{name} ends at the last token of input_ids"):
            parse(row)
        with pytest.raises(BadRow, match=f"{name} ends at the last token"):
            parse(row | {name: json.dumps(values)})  # of a CSV file
        padded = {"input_ids": [*IDS, 0], "attention_mask": [1] * 8 + [0], name: values}
        with pytest.raises(BadRow, match=f"{name} ends at the last token"):
            parse(padded)
    for values in ([8], [3, 4], [8, 4], 8, [0.5, 7.5], None):
        parse({"input_ids": IDS, name: values})


@pytest.mark.parametrize(
    "name", ["split_idx", "sep_index", "num_context_tokens", "target_idx", "n_prompt", "start_id"]
)
def test_numbers_that_may_divide_a_row_of_ids_are_named(name):
    for value in (4, "4"):  # a cell of a CSV file is a text
        assert parse({"input_ids": IDS, name: value}).unread == (name,)
    assert not parse({"input_ids": IDS, name: 99}).unread, "it is not within the row"


def test_classes_beside_token_ids_are_named():
    assert parse({"input_ids": IDS, "label": 0}).unread == ("label",)
    assert not parse({"input_ids": IDS, "label": False}).learned


@pytest.mark.parametrize("form", ["csv", "text.parquet", "list.parquet", "jsonl"])
def test_facts_beside_token_ids_do_not_depend_on_the_file(tmp_path, form):
    """Lists and numbers are texts in CSV files, and may be in tables."""
    facts = {"loss_mask": [0] * 4 + [1] * 4, "prompt_length": 3, "split_idx": 4, "weight": 1}
    for more, unread, bad in (
        ({}, {"split_idx": 2}, 0),
        ({"document_id": [0, 0, 0, 0, 1, 1, 1, 1]}, {}, 2),
        ({"my_mask": [True] * 8}, {}, 2),
        ({"num_tokens": [4, 4]}, {}, 2),
    ):
        rows = [{"input_ids": [*IDS[:-1], last], **facts, **more} for last in (10, 11)]
        path = tmp_path / f"{len(more)}{next(iter(more), '')}.{form}"
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        texts = {k: [json.dumps(v) for v in values] for k, values in columns.items()}
        if form == "csv":
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([texts, *zip(*texts.values(), strict=True)])
        elif form == "jsonl":
            write_jsonl(path, rows)
        else:
            ids = {"input_ids": columns["input_ids"]}
            pq.write_table(pa.table(texts | ids if form[0] == "t" else columns), path)
        reader = CorpusReader([str(path)], max_bad_rows=ALL)
        if bad:
            with pytest.raises(CorpusError, match=f"no usable row|{next(iter(more))}"):
                list(reader)
            continue
        assert [r.loss_mask for r in reader] == [facts["loss_mask"]] * 2
        assert (reader.reports[0].unread, reader.reports[0].bad) == (unread, bad)


def test_reasons_that_a_file_has_as_json_text_are_a_list():
    record = parse({"messages": TWO, "finish_reason": '["length", "stop"]'})
    assert [m.get("finish_reason") for m in record.messages[1::2]] == ["length", None]
    assert not record.notes


PACKS = [
    {"position_ids": [0, 1, 2, 3, 0, 1, 2, 3]},
    {"seq_lengths": [4, 4]},
    {"seq_lens": [4, 0, 4]},
    {"sequence_lengths": [4, 4], "position_ids": [0, 1, 2, 3, 0, 1, 2, 3]},
    {"cu_seqlens": [0, 4, 8]},
    {"cu_seqlens": [0, 4, 8, -1, -1]},
    {"seq_start_id": [0, 4]},
    {"segment_ids": [1, 1, 1, 1, 2, 2, 2, 2]},
    {"document_ids": [0, 0, 0, 0, 1, 1, 1, 1]},
    {"sequence_id": [7, 7, 7, 7, 3, 3, 3, 3]},
    {"attention_mask": [1, 1, 1, 1, 2, 2, 2, 2]},
    {"attention_mask": [1] * 8, "seq_idx": [0, 0, 0, 0, 1, 1, 1, 1]},
]


@pytest.mark.parametrize("pack", PACKS)
def test_packed_rows_are_their_documents(pack):
    labels = [-100, 6, 7, 8, -100, -100, 9, 10]
    record = parse({"input_ids": IDS, "labels": labels, **pack})
    assert record.lengths == (4, 4) and record.input_ids == IDS and not record.unread
    documents = Renderer(tokenizer("chatml"), vocab_size=50).render(record).documents
    assert [d.input_ids for d in documents] == [IDS[:4], IDS[4:]]
    assert [d.loss_mask for d in documents] == [[0, 1, 1, 1], [0, 0, 1, 1]]
    assert [d.where for d in documents] == ["f:1 (document 0)", "f:1 (document 1)"]
    with pytest.raises(BadRow, match="a prompt is one"):
        parse_prompt({"input_ids": IDS, **pack}, source="f", where="f:1")


def test_padding_of_a_pack_is_left_out_and_a_document_without_labels_is_counted():
    padded = {"input_ids": [*IDS, 0, 0], "labels": [-100, 6, 7, 8, -100, -100, -100, -100, 0, 0]}
    for pack in (
        {"attention_mask": [1, 1, 1, 1, 2, 2, 2, 2, 0, 0]},
        {"segment_ids": [1, 1, 1, 1, 2, 2, 2, 2, 0, 0]},
        {"sequence_id": [0, 0, 0, 0, 1, 1, 1, 1, -1, -1]},
        {"seq_lens": [4, 4, 2], "attention_mask": [1] * 8 + [0, 0]},
        {"seq_lens": [4, 4], "attention_mask": [1] * 8 + [0, 0]},
        {"position_ids": [0, 1, 2, 3, 0, 1, 2, 3, 9, 9], "attention_mask": [1] * 8 + [0, 0]},
    ):
        record = parse(padded | pack)
        assert (record.input_ids, record.lengths) == (IDS, (4, 4)), pack
        result = Renderer(tokenizer("chatml"), vocab_size=50).render(record)
        assert [d.input_ids for d in result.documents] == [IDS[:4]]
        assert result.dropped == {"nothing-supervised": 1}


@pytest.mark.parametrize(
    ("pack", "why"),
    [
        ({"seq_lengths": [4, 3]}, "seq_lengths ends at token 7, input_ids has 8"),
        ({"cu_seqlens": [4, 8]}, "cu_seqlens does not begin with 0"),
        ({"cu_seqlens": [0, 6, 4, 8]}, "cu_seqlens ends at"),
        ({"position_ids": [0, 1, 2, 3, 0, 1, 2, 5]}, "position_ids has 5 after 2"),
        ({"position_ids": [2, 3, 4, 5, 6, 7, 8, 9]}, "has 2 after nothing"),
        ({"position_ids": [0, 1, 2, 3, 0, 1, 2, 3], "seq_lens": [3, 5]}, "do not name the same"),
        ({"segment_ids": [1, 1, 2, 2, 1, 1, 2, 2]}, "comes back to a document"),
        ({"position_ids": [0, 1, 2]}, "position_ids has 3 values, input_ids 8"),
    ],
)
def test_packs_that_contradict_each_other_are_refused(pack, why):
    with pytest.raises(BadRow, match=why):
        parse({"input_ids": IDS, **pack})


def test_lists_of_tokens_under_unknown_names_are_read_from_tables_too(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2, 3]], "note": ["x"], "odd": [[0, 1, 1]]}), path)
    with pytest.raises(CorpusError, match="odd has a value for each token"):
        read(path)


# -- system messages, tools, calls -----------------------------------------------------------------

TOOL = {"name": "w", "description": "weather", "parameters": {"type": "object", "properties": {}}}
IN_API = {"type": "function", "function": TOOL}
CALL = {"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}


@pytest.mark.parametrize("name", ["system", "system_prompt", "system_message", "systemPrompt"])
def test_a_system_prompt_under_any_name_is_used_or_named(name):
    assert parse({"messages": TWO, name: "s"}).messages[0] == {"role": "system", "content": "s"}
    own = [{"role": "system", "content": "own"}, *TWO]
    assert parse({"messages": own, name: "s"}).unread == (name,)
    assert parse({"messages": own, name: "own"}).unread == ()
    both = {"system": "one", "sys_prompt": "another"}
    assert parse({"messages": TWO, **both}).unread == ("sys_prompt",)


def test_tools_under_any_name_and_inside_messages_are_those_of_the_conversation():
    assert parse({"messages": TWO, "functions": [TOOL]}).tools == [IN_API]
    assert parse({"messages": TWO, "functions": json.dumps([TOOL])}).tools == [IN_API]
    system = {"role": "system", "content": "s", "tools": [TOOL]}
    record = parse({"messages": [system, *TWO]})
    assert record.tools == [IN_API] and record.messages[0] == {"role": "system", "content": "s"}
    assert parse({"messages": [system, *TWO], "tools": [IN_API]}).unread == ()
    other = parse({"messages": [system, *TWO], "tools": [IN_API | {"strict": True}]})
    assert other.unread == ("messages.tools",)
    reads = Layout(keys=frozenset({"tools"}))
    assert parse({"messages": [system, *TWO]}, layout=reads).messages[0] == system


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        (TOOL, IN_API),
        (TOOL | {"type": "function"}, IN_API),
        (IN_API, IN_API),
        ({"type": "web_search", "name": "w"},) * 2,
        ({"function": "w", "name": "w"},) * 2,
    ],
)
def test_bare_functions_are_given_as_servers_give_them_and_that_is_named(tool, given):
    for row in ({"tools": [tool]}, {"functions": [tool]}):
        record = parse({"messages": TWO, **row})
        assert record.tools == [given]
        assert any("bare functions" in note for note in record.notes) is (tool != given)


def test_calls_under_older_names_are_tool_calls():
    text = {"name": "w", "arguments": '{"city": "Paris"}'}
    legacy = [U, {"role": "assistant", "content": None, "function_call": text}]
    assert parse({"messages": legacy}).messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]}
    ]
    reads = Layout(keys=frozenset({"function_call"}))
    assert parse({"messages": legacy}, layout=reads).messages[1]["function_call"] == text
    for speaker in ("function_call", "tool_call"):
        said = [
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "I look."},
            {"from": speaker, "value": json.dumps(text)},
            {"from": speaker, "value": json.dumps([text])},
            {"from": "observation", "value": "sun"},
            {"from": "gpt", "value": "Sunny."},
        ]
        messages = parse({"conversations": said}).messages
        assert messages[1] == {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [CALL, CALL],
        }
        assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    with pytest.raises(BadRow, match="is a string but not JSON"):
        parse({"conversations": [said[0], {"from": "tool_call", "value": "w(Paris)"}]})
    record = parse({"query": "q", "answers": json.dumps([text]), "tools": json.dumps([TOOL])})
    assert record.messages[1]["tool_calls"] == [CALL] and record.tools == [IN_API]


# -- preference data -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "x"},
        {"system": "", "question": "q", "chosen": "a", "rejected": "x"},
        {"prompt": [U], "chosen": [A], "rejected": [{"role": "assistant", "content": "x"}]},
        {"prompt": "q", "chosen": [U, A], "rejected": [U, A], "score_chosen": 8.0},
        {"chosen": [U, A], "rejected": [U, {"role": "assistant", "content": "x"}]},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
        },
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "x"},
        {"messages": [U, A], "rejected_response": "x"},
        {"messages": [U, A], "chosen": [U, A], "rejected": [U], "prompt": "q"},
    ],
)
def test_the_chosen_answer_is_learned(row):
    record = parse(row)
    assert record.messages == [U, A] and not record.unread


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "x"}, "a transcript of HH-RLHF"),
        ({"prompt": "other", "chosen": [U, A]}, "the question beside it is not part of it"),
        ({"chosen": [A]}, "an answer without a question"),
        (
            {"prompt": "q", "response_a": "a", "response_b": "b"},
            "response_a, response_b: answers to",
        ),
        (
            {"instruction": "q", "completions": [{"response": "a"}]},
            "completions: answers to compare",
        ),
    ],
)
def test_preference_data_without_a_clear_answer_is_refused(row, why):
    with pytest.raises(BadRow, match=why):
        parse(row)


def test_several_text_parts_of_a_message_are_named(tmp_path, caplog):
    """Servers join them otherwise; one part, and empty ones, say nothing."""
    two = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    one = {
        "role": "user",
        "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": ""}],
    }
    assert parse({"messages": [two, A]}).messages == parse({"messages": [one, A]}).messages
    _, reports = read(write_jsonl(tmp_path / "a.jsonl", [{"messages": [two, A]}] * 3))
    assert list(reports[0].notes.values()) == [3]
    assert "warning[flags]" in caplog.text and "vLLM puts a newline" in caplog.text
    caplog.clear()
    read(write_jsonl(tmp_path / "b.jsonl", [{"messages": [one, A]}]))
    assert "warning[flags]" not in caplog.text


# -- nulls -----------------------------------------------------------------------------------------


def call(name, **arguments):
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def tool(name, **properties):
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXT = {"type": "string"}
PADDED = [
    {"tools": [tool("w", city=TEXT)], "messages": [U, call("w", city="Paris")]},
    {"tools": [tool("c", expr=TEXT | {"default": None})], "messages": [U, call("c", expr="1+1")]},
    {"tools": [tool("c", kind={"const": None})], "messages": [U, A]},
    {"tools": [tool("e", unit={"enum": ["a", None]})], "messages": [U, A]},
    {"tools": [tool("l", l=TEXT)], "messages": [U, call("l", l=[{"c": 1}, {"d": {"e": 2}}])]},
    {"tools": [tool("l", l=TEXT)], "messages": [U, call("l", l=[{"d": {"f": 2}}])]},
]


def facts_of(path):
    return [(r.messages, r.tools) for r in read(path)[0]]


def test_nulls_of_datasets_go_and_those_of_schemas_stay(tmp_path):
    """The rows as written, through `to_json`, `to_parquet` and `save_to_disk`."""
    wanted = facts_of(write_jsonl(tmp_path / "a.jsonl", PADDED))
    assert wanted == [(row["messages"], row["tools"]) for row in PADDED]
    made = datasets.Dataset.from_list(PADDED)
    made.to_json(tmp_path / "b.jsonl")
    made.to_parquet(tmp_path / "b.parquet")
    made.save_to_disk(tmp_path / "b")
    assert '"expr":null' in (tmp_path / "b.jsonl").read_text(), "the test shows nothing"
    for name in ("b.jsonl", "b.parquet", "b"):
        assert facts_of(tmp_path / name) == wanted, name


def test_rows_in_which_nulls_are_left_out_are_counted(tmp_path, caplog):
    """In tools, arguments and template arguments, and not where nothing is left out."""
    first = PADDED[0] | {"chat_template_kwargs": {"deep": True}}
    rows = [first, *PADDED[1:2], PADDED[0] | {"chat_template_kwargs": {"short": 1}}]
    made = datasets.Dataset.from_list(rows)
    made.to_json(tmp_path / "b.jsonl")
    made.to_parquet(tmp_path / "b.parquet")
    made.save_to_disk(tmp_path / "b")
    wanted = {"tools": 3, "arguments": 3, "chat_template_kwargs": 2}
    for name in ("b.jsonl", "b.parquet", "b"):
        with caplog.at_level("INFO"):
            _, reports = read(tmp_path / name)
        assert reports[0].nulls == wanted, name
        assert "nulls left out, as those that `datasets` adds: " in caplog.text
        caplog.clear()
        layout = Layout(columns={"messages": "messages"})
        assert read(tmp_path / name, layout=layout)[1][0].nulls == wanted, name
    _, plain = read(write_jsonl(tmp_path / "a.jsonl", [{"messages": TWO}, *PADDED]))
    assert plain[0].nulls == {}


def test_nulls_that_nobody_added_stay():
    real = call("w", city=None)
    assert parse({"messages": [U, real], "tools": [tool("w", city=TEXT)]}).messages[1] == real
    text = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w"}}]}
    text["tool_calls"][0]["function"]["arguments"] = '{"city": null}'
    padded = U | {"tool_calls": None}
    found = parse({"messages": [padded, text]}).messages[1]["tool_calls"][0]["function"]
    assert found["arguments"] == {"city": None}  # a text has its own nulls
    for row in ([padded, real], [U, call("w", town=None)]):  # of Arrow: by a question, by a schema
        record = parse({"messages": row, "tools": [tool("w", city=TEXT)]})
        assert record.messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    schema = json.dumps([tool("w", city=TEXT | {"description": None})])
    assert "description" in str(parse({"messages": TWO, "tools": schema}).tools)
    of_arrow = tool("w", city=TEXT | {"default": None, "description": None}, default=None)
    assert parse({"messages": TWO, "tools": [of_arrow]}).tools == [tool("w", city=TEXT)]


# -- names of columns ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"query": "q", "response": "a"}, "query+response"),
        ({"conversation": [U, A], "conversation_id": "0", "turn": 1}, "conversation"),
        ({"question": "q", "response": "a", "id": 3}, "question+response"),
        ({"input": "q", "output": "a"}, "input+output"),
        ({"input": [U], "output": "a", "license": "mit"}, "input+output"),
        ({"inputs": "q", "targets": "a"}, "inputs+targets"),
        ({"problem": "q", "solution": "a"}, "problem+solution"),
        ({"instruction": "q", "response": "a"}, "instruction+response"),
    ],
)
def test_usual_names_are_read(row, kind):
    record = parse(row)
    assert (record.kind, record.messages) == (kind, [U, A]) and not record.unread
    prompt = parse_prompt(row, source="f", where="f:1")
    assert prompt.messages == [U]


def test_a_context_stands_under_the_instruction():
    for answer in ("response", "output"):
        row = {"instruction": "q", "context": "c", answer: "a"}
        assert parse(row).messages == [{"role": "user", "content": "q\n\nc"}, A]
        assert parse_prompt(row, source="f", where="f").messages[0]["content"] == "q\n\nc"
    assert parse({"question": "q", "context": "c", "answer": "a"}).unread == ("context",)


def test_columns_that_several_may_be_are_refused_with_the_option_that_chooses():
    with pytest.raises(BadRow, match=r"solution and answer|answer and solution") as caught:
        parse({"problem": "q", "solution": "long", "answer": "42"})
    assert "--columns prompt=problem,answer=answer" in str(caught.value)
    with pytest.raises(BadRow, match="--columns prompt=ask,answer=say"):
        parse({"ask": "q", "say": "a", "id": "x"})
    with pytest.raises(BadRow, match="--columns prompt=chat,answer=COLUMN"):
        parse({"system": "s", "chat": "USER: q ASSISTANT: a"})
    with pytest.raises(BadRow, match=r"answers is no tool call .* --columns prompt=question"):
        parse({"question": "q", "answers": {"text": ["a"]}})
    with pytest.raises(BadRow, match="--columns messages=chat_log"):
        parse({"chat_log": [U, A]})


def test_columns_of_a_user_are_read_instead_of_others():
    layout = Layout(columns=parse_columns("prompt=ask+about, answer=say, system=who"))
    row = {"messages": TWO, "ask": "q", "about": "it", "say": "a", "who": "s", "other": 1}
    record = parse(row, layout=layout)
    question = {"role": "user", "content": "q\n\nit"}
    assert record.messages == [{"role": "system", "content": "s"}, question, A]
    assert record.unread == ("other",)
    lacking = {"ask": "q", "about": "it", "who": "s"}
    for row, why in ((lacking, "is not in the row"), (lacking | {"say": None}, "is null")):
        with pytest.raises(BadRow, match=rf"'say' of --columns {why} \(found: about, ask"):
            parse(row, layout=layout)
    masked = Layout(columns=parse_columns({"loss_mask": "odd"}))
    assert parse({"input_ids": [1, 2, 3], "odd": [0, 1, 1]}, layout=masked).loss_mask == [0, 1, 1]
    thought = Layout(columns=parse_columns('{"prompt": "q", "answer": "a", "reasoning": "t"}'))
    answer = parse({"q": "q", "a": "a", "t": "hm"}, layout=thought).messages[1]
    assert answer == A | {"reasoning_content": "hm"}


def test_a_name_that_no_row_has_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "q", "a": "a"}] * 3)
    named = Layout(columns={"prompt": "q", "answer": "a", "system": "systm"})
    with pytest.raises(ConfigError, match="no row has the column 'systm'"):
        list(CorpusReader([path], layout=named))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("prompt", "write NAME=COLUMN"),
        ("question=q", "'question' is none of messages, prompt"),
        ("answer=a", "an answer needs its question"),
        ("prompt=q,prompt=r", "a name is there twice"),
        ("prompt=q,text=t", "give one of messages, prompt, text"),
        ("{", "not valid JSON"),
    ],
)
def test_columns_that_say_nothing_are_refused(given, why):
    with pytest.raises(ConfigError, match=why):
        parse_columns(given)


# -- what nothing reads ----------------------------------------------------------------------------


def test_what_neither_the_table_nor_the_template_reads_is_counted_and_named(tmp_path, caplog):
    rows = [
        {"messages": [U, A | {"mood": "glad", "name": "x"}], "id": i, "secret": "s"} for i in "ab"
    ]
    rows += [{"messages": [U, A | {"mood": "sad"}], "enable_thinking": False}, {"messages": TWO}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    reads = tokenizer("qwen3")
    reader = CorpusReader([path], layout=layout_of(reads))
    list(reader)
    assert reader.reports[0].unread == {"secret": 2, "messages.mood": 3, "enable_thinking": 1}
    (line,) = [r.getMessage() for r in caplog.records if "warning[unread]" in r.getMessage()]
    assert (
        "messages.mood in 3 rows, secret in 2 rows, enable_thinking in 1 row;" in line
        and path in line
    )
    assert "the template reads enable_thinking from chat_template_kwargs" in line
    caplog.clear()
    moody = template(CHATML.replace("message.content", "message.content + (message.mood or '')"))
    reader = CorpusReader([path], layout=layout_of(moody))
    list(reader)
    assert reader.reports[0].unread == {"secret": 2, "enable_thinking": 1}
    columns = {"messages": [[U, A]] * 3, "secret": ["a", None, "c"], "id": [1, 2, 3]}
    columns |= {"empty": pa.array([None] * 3, pa.string()), "deep": [{"a": 1}] * 3}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=2)
    datasets.Dataset(pa.table(columns)).save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "saved"):  # of a table only the columns that matter are read
        (report,) = read(tmp_path / name)[1]
        assert report.unread == {"secret": 2, "deep": 3}, name


@pytest.mark.parametrize(
    "name",
    ["task_prompt", "task_instruction", "model_system_prompt", "chosen_system", "chosen_tools"],
)
def test_no_pattern_of_ignored_names_hides_a_prompt(name):
    assert parse({"messages": TWO, name: "Talk like a pirate."}).unread == (name,)
    other = name.rpartition("_")[0] + "_id"
    for ignored in (other, "num_tools", "n_messages", "rejected_prompt", "task_name"):
        assert not parse({"messages": TWO, ignored: "3"}).unread, ignored


def test_no_pattern_of_ignored_names_hides_a_flag_of_the_chosen_answer():
    for name, value in (("chosen_mask", [0]), ("chosen_weight", 0), ("chosen_loss", False)):
        assert parse({"prompt": "q", "chosen": "a", name: value}).unread == (name,)
    assert not parse({"prompt": "q", "chosen": "a", "rejected_mask": [0]}).unread


def test_an_instruction_in_place_of_a_switch_is_named():
    """A boolean in OpenHermes; a text there changes what the target is asked."""
    for value in (True, False, "true", None, ""):
        assert not parse({"messages": TWO, "custom_instruction": value}).unread
    row = {"messages": TWO, "custom_instruction": "Talk like a pirate."}
    assert parse(row).unread == ("custom_instruction",)


@pytest.mark.parametrize("name", ["done_reason", "finishReason", "stopReason"])
def test_reasons_of_other_servers_cut_answers(name):
    """Ollama's, Gemini's and Bedrock's."""
    for row in (
        {"messages": [U, A | {name: "max_tokens"}]},
        {"messages": [U, A], name: "MAX_TOKENS"},
    ):
        assert parse(row).messages[1]["finish_reason"] == "length"


def test_answers_that_were_not_chosen_are_named():
    assert parse({"question": "q", "answer": "4", "response": "2+2=4"}).unread == ("response",)
    assert parse({"messages": [U, A], "prompt": "q", "response": "a"}).unread == ()
    assert parse({"messages": [U, A], "response": "other"}).unread == ("response",)
    assert parse({"messages": [U, A], "reasoning": "on"}).unread == ()
    assert parse({"prompt": "q", "response": "a", "reasoning": "thought"}).unread == ("reasoning",)
    assert parse({"messages": [U, A], "input_ids": [1], "labels": [1]}).unread == (
        *("input_ids", "labels"),
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{% for m in messages %}{{ m.role }}{{ m['mood'] }}{% endfor %}", {"role", "mood"}),
        ("{% for m in messages[1:] %}{{ m.get('mood') }}{% endfor %}", {"get", "mood"}),
        ("{% for m in messages %}{% if 'mood' in m %}x{% endif %}{% endfor %}", {"mood"}),
        (
            "{% set l = messages %}{% for m in l %}{% set c = m.a %}{{ c.b }}{% endfor %}",
            {"a", "b"},
        ),
        ("{% macro f(x) %}{{ x.mood }}{% endmacro %}{{ f(messages[0]) }}", {"mood"}),
        ("{{ messages | map(attribute='mood') | join }}", {"mood"}),
        ("{% for t in tools %}{{ t.secret }}{% endfor %}", set()),
        ("{% for m in messages %}{{ m | tojson }}{% endfor %}", None),
        ("{% for m in messages %}{% for k, v in m.items() %}{{ v }}{% endfor %}{% endfor %}", None),
        ("{{ messages }}", None),
    ],
)
def test_the_keys_that_a_template_reads(text, wanted):
    assert message_keys(template(text)) == (None if wanted is None else frozenset(wanted))


def test_patterns_are_read_after_names():
    assert meaning_of("is_trainable") == "learned" and meaning_of("is_english") == "ignored"
    assert meaning_of("sequence_id") == "segments" and meaning_of("chat_id") == "ignored"


def test_no_pattern_hides_a_name_of_learning():
    for name in ("is_trained_on", "has_train_mask", "learning_score", "is_unmasked"):
        assert meaning_of(name) is None and meaning_of(name, of_message=True) is None, name
    row = {"messages": [U, A | {"is_trained_on": False}], "has_weights": False}
    assert parse(row).unread == ("messages.is_trained_on", "has_weights")
    assert parse({"messages": TWO, "is_supervised": [0, 1]}).messages[1]["weight"] == 0


def test_a_text_of_flags_is_no_number():
    for row in ({"input_ids": [1, 2, 3]}, {"messages": TWO}):
        with pytest.raises(BadRow, match="loss_mask is a text of flags"):
            parse(row | {"loss_mask": "011"})
        assert [parse(row | {"loss_mask": text}).learned for text in ("0", "1")] == [False, True]


def test_bad_rows_name_the_cause():
    value = {"role": "user", "content": [{"type": "text", "value": "q"}]}
    assert parse({"messages": [value, A]}).messages == [U, A]
    with pytest.raises(BadRow, match=r"a text part without a text \(its keys: type, body\)"):
        parse({"messages": [{"role": "user", "content": [{"type": "text", "body": "q"}]}]})
    with pytest.raises(BadRow, match=r"\(user\) has no content \(its keys: role, body\)"):
        parse({"messages": [{"role": "user", "body": "q"}]})
    with pytest.raises(BadRow, match=r"unknown role None \(its keys: who, content\)"):
        parse({"messages": [{"who": "user", "content": "q"}]})


@pytest.mark.parametrize(
    ("row", "mask"),
    [
        ({"input_ids": "[5, 6, 7]", "loss_mask": "[0, 0, 1]"}, [0, 0, 1]),
        ({"input_ids": [5, 6, 7], "assistant_masks": "[0, 1, 1]"}, [0, 1, 1]),
        ({"input_ids": [5, 6, 7], "labels": "[-100, 6, 7]"}, [0, 1, 1]),
        ({"input_ids": [5, 6, 7], "masked": " [1, 0, 0]"}, [0, 1, 1]),
    ],
)
def test_lists_that_a_file_has_as_json_text_are_lists(row, mask):
    """CSV files, and columnar files of some exporters."""
    assert parse(row).loss_mask == mask


def test_packs_and_flags_as_json_text_are_read():
    assert parse({"input_ids": "[5, 6, 7]", "position_ids": "[0, 1, 0]"}).lengths == (2, 1)
    assert weights({"messages": TWO, "loss_mask": "[0, 1]"}) == [None, 0, None, None]


@pytest.mark.parametrize("name", ["loss_mask", "masked", "labels", "assistant_masks"])
def test_no_mask_is_dropped_because_of_its_form(name):
    ids = {"input_ids": [5, 6, 7]}
    with pytest.raises(BadRow, match=f"{name} is an object, not a list"):
        parse(ids | {name: {"a": 1}})
    with pytest.raises(BadRow, match=f"{name} is a string but not JSON"):
        parse(ids | {name: "[0 0 1]"})
    if name in ("loss_mask", "masked"):
        assert parse({"messages": TWO, name: {"a": 1}}).unread == (name,)
        with pytest.raises(BadRow, match=f"{name} is a string but not JSON"):
            parse({"messages": TWO, name: "[0 1]"})
    else:
        assert parse(ids | {name: 1}).unread == (name,)


@pytest.mark.parametrize("name", ["n_prompt", "num_response_tokens", "completion_start_idx"])
def test_a_number_that_may_divide_a_row_of_tokens_is_named(name):
    ids = {"input_ids": [5, 6, 7]}
    assert parse(ids | {name: 2}).unread == (name,)
    assert parse(ids | {name: 20}).unread == parse({"messages": TWO, name: 2}).unread == ()


def test_flags_of_parts_of_a_message_are_those_of_the_message_or_refused():
    off, on = {"type": "text", "text": "a", "train": False}, {"type": "text", "text": "b"}
    for part in (off, {"text": "a", "weight": 0}, {"text": "a", "label": False}):
        assert weights({"messages": [U, A | {"content": [part]}]}) == [None, 0]
        with pytest.raises(BadRow, match=r"the content of messages.1. leaves out parts"):
            parse({"messages": [U, A | {"content": [part, on]}]})
    assert weights({"messages": [U, A | {"content": [on | {"label": True}]}]}) == [None, None]
    with pytest.raises(BadRow, match=r"a part that is a thought"):  # Gemini's
        parse({"contents": [U, {"role": "model", "parts": [{"text": "t", "thought": True}, on]}]})
    named = parse({"messages": [U, A | {"content": [on | {"fancy": 1, "cache_control": {}}]}]})
    assert named.unread == ("messages.content.fancy",)


def test_transcripts_of_both_speakers_are_no_answers_and_formatted_prompts_are_named():
    chosen = "\n\nHuman: q\n\nAssistant: a"
    for row in ({"prompt": "q", "chosen": chosen}, {"question": "q", "answer": chosen}):
        with pytest.raises(BadRow, match="is a transcript with both speakers"):
            parse(row)
    for prompt in ("\n\nHuman: q\n\nAssistant:", "Do it.\n\n### Response:\n", "q\n<|assistant|>\n"):
        assert "formatted already" in parse({"prompt": prompt, "completion": "a"}).notes[0]
    for prompt in ("What is an assistant?", "Write a response", "Name the AI", "GPT"):
        assert not parse({"prompt": prompt, "completion": "a"}).notes


@pytest.mark.parametrize("name", ["desirable", "is_desirable", "is_chosen", "is_preferred"])
def test_an_answer_that_is_not_wanted_is_not_learned_under_other_names(name):
    assert not parse({"messages": TWO, name: False}).learned
    assert parse({"messages": TWO, name: True}).learned
    assert meaning_of("is_context", of_message=True) is None


@pytest.mark.parametrize("name", ["is_good", "is_bad", "has_problem", "is_anything", "rejected"])
def test_a_judgement_of_an_unknown_name_is_named(name):
    """No pattern takes "is_*" and "has_*" together: what they judge is not known."""
    assert parse({"messages": TWO, name: True}).unread == (name,)
    if name != "rejected":
        answer = A | {name: False}
        assert parse({"messages": [U, answer]}).unread == (f"messages.{name}",)


# -- what stands in another form -------------------------------------------------------------------


F_CALL = {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize("name", ["parameters", "args", "input", "kwargs"])
def test_arguments_of_calls_under_other_names_are_not_lost(name):
    for call in ({"name": "f", name: {"a": 1}}, {"function": {"name": "f", name: '{"a": 1}'}}):
        called = parse({"messages": [U, {"role": "assistant", "tool_calls": [call]}]}).messages[1]
        function = called["tool_calls"][0]
        assert function.get("function", function) == F_CALL
    both = {"messages": [U, {"role": "assistant", "tool_calls": [F_CALL | {name: {"b": 2}}]}]}
    assert parse(both).unread == (f"messages.tool_calls.{name}",)


def test_calls_as_json_text_are_calls_and_what_is_none_is_refused():
    for given in ({"tool_calls": json.dumps([F_CALL])}, {"function_call": json.dumps(F_CALL)}):
        called = parse({"messages": [U, {"role": "assistant", "content": "", **given}]}).messages[1]
        function = called["tool_calls"][0]
        assert function.get("function", function) == F_CALL
    for given, why in (
        ({"tool_calls": [{"arguments": {}}]}, "has no name"),
        ({"function_call": "f(a=1)"}, "not JSON"),
        ({"function_call": [1]}, "not a call"),
    ):
        with pytest.raises(BadRow, match=why):
            parse({"messages": [U, {"role": "assistant", "content": "x", **given}]})
    odd = {"messages": [U, {"role": "assistant", "tool_calls": [F_CALL | {"result": "r"}]}]}
    assert parse(odd).unread == ("messages.tool_calls.result",)


def test_two_columns_of_one_meaning_that_differ_are_named():
    other = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    assert parse({"messages": TWO, "conversations": other}).unread == ("conversations",)
    assert parse({"messages": TWO, "conversations": TWO[:2]}).unread == ()
    assert parse({"messages": [U, A | {"from": "human"}]}).unread == ("messages.from",)
    assert parse({"messages": [U, A | {"from": "gpt"}]}).unread == ()
    thoughts = {"reasoning_content": "t", "thinking": "u"}
    assert parse({"messages": [U, A | thoughts]}).unread == ("messages.thinking",)
    assert parse({"messages": [U, A | {"thinking": True}]}).unread == ("messages.thinking",)
    with pytest.raises(BadRow, match=r"reasoning of messages.1. is a list, not text"):
        parse({"messages": [U, A | {"reasoning": ["t"]}]})


def test_sides_that_are_chats_as_json_text_are_chats():
    row = {"prompt": json.dumps(TWO[:3]), "completion": json.dumps(TWO[3])}
    assert [m["content"] for m in parse(row).messages] == ["q", "a", "more", "b"]
    for text in ("[1, 2] sorted?", '{"a": 1}', '[{"role": "king"}]', "[{"):
        assert parse({"prompt": text, "completion": "a"}).messages[0]["content"] == text


@pytest.mark.parametrize("reason", ["model_length", "MAX_TOKENS", "abort", "content_filter"])
def test_an_answer_that_something_cut_has_no_end(reason):
    message = parse({"messages": [U, A | {"finish_reason": reason}]}).messages[1]
    assert message["finish_reason"] == "length"
    assert not parse({"messages": TWO, "finish_reason": "stop"}).notes
    assert not parse({"messages": TWO, "stop_reason": "151645"}).notes  # vLLM's: a token
    assert "'bored' is not known" in parse({"messages": TWO, "finish_reason": "bored"}).notes[0]


def test_finish_reasons_may_be_a_list_and_none_is_dropped_without_a_word():
    def cut(row):
        record = parse(row)
        return [m.get("finish_reason") for m in record.messages], record.unread, record.notes

    none, last = [None] * 4, [None, None, None, "length"]
    assert cut({"messages": TWO, "finish_reason": ["stop", "length"]}) == (last, (), ())
    assert cut({"messages": TWO, "finish_reason": [*[None] * 3, "MAX_TOKENS"]}) == (last, (), ())
    system = {"system_prompt": "Be brief.", "messages": TWO, "stop_reason": ["length", "stop"]}
    assert cut(system) == ([None, None, "length", None, None], (), ())
    ids = {"finish_reason": ["stop", "length"], "stop_reason": [151645, None]}  # vLLM's
    assert cut({"messages": TWO} | ids) == (last, (), ())
    for value in (["length"], ["stop", True], {"type": "length"}, True):
        assert cut({"messages": TWO, "finish_reason": value}) == (none, ("finish_reason",), ())
    for value in (["length"], {"type": "length"}):
        row = {"messages": [*TWO[:3], TWO[3] | {"finish_reason": value}]}
        assert parse(row).unread == ("messages.finish_reason",)
    row = {"messages": [*TWO[:3], TWO[3] | {"finish_reason": "stop"}], "finish_reason": "length"}
    assert cut(row)[0] == last and "differ" in cut(row)[2][0]
    assert parse({"messages": [U, A | {"status": "incomplete"}]}).unread == ("messages.status",)
    assert parse({"messages": [U, A | {"status": "completed"}]}).unread == ()


# -- what stands where nothing is read -------------------------------------------------------------


def test_what_an_unread_object_says_of_learning_and_prompts_is_named():
    def unread(**columns):
        return parse({"messages": [U, A]} | columns).unread

    assert unread(metadata={"train": False, "id": 1}) == ("metadata.train",)
    assert unread(extra_info={"loss_mask": [0, 1]}) == ("extra_info.loss_mask",)
    assert unread(meta={"masked": 1, "system_prompt": "Be brief."}) == (
        *("meta.masked", "meta.system_prompt"),
    )
    assert unread(info={"finish_reason": "length"}) == ("info.finish_reason",)
    assert unread(metadata={"train": True, "weight": 1.0, "finish_reason": "stop"}) == ()
    assert unread(metadata={"system": A["content"]}) == (), "it is read already"
    for said in ({"weight": 0}, '{"weight": 0}', [{"weight": 0}]):
        flagged = parse({"messages": [U, A | {"metadata": said}]})
        assert flagged.unread == ("messages.metadata.weight",)
    assert unread(metadata='{"train": false}') == unread(metadata=[{"train": False}])
    assert unread(metadata='{"train": false}') == ("metadata.train",)
    assert unread(metadata={"flags": '{"mask": {"train": 0}}'}) == ("metadata.flags.mask.train",)
    assert unread(metadata="{no JSON", info="train") == ()
    assert unread(metadata=json.dumps(json.dumps([[{"train": False}]]))) == (), "a text of a text"


def test_verdicts_about_an_answer_are_named():
    """Unknown ones are, and those that a pattern or a list would hide."""
    for name in ("is_correct", "correct", "passed", "is_valid"):
        assert parse({"messages": [U, A], name: False}).unread == (name,)
    assert parse({"messages": [U, A | {"status": "failed"}]}).unread == ("messages.status",)
    (note,) = parse({"messages": [U, A], "finish_reason": 2}).notes
    assert "finish_reason 2 is a number" in note
    assert parse({"messages": [U, A], "stop_reason": 151645}).notes == ()


def test_tables_tell_what_lines_tell_about_columns_that_are_not_read(tmp_path):
    """Only columns of known meanings are read of a table, and those that may say what is learned"""
    rows = [{"messages": [U, A], "rejected": True, "metadata": {"train": False}, "thinking": True}]
    rows = [
        row | {"lang": "de", "info": '{"weight": 0}', "meta": [{"a": {"masked": 1}}]}
        for row in rows
    ]
    reads = template(CHATML + "{{- thinking or '' }}{{- lang or '' }}")
    named = {"rejected": 1, "metadata.train": 1, "thinking": 1, "lang": 1}
    named |= {"info.weight": 1, "meta.a.masked": 1}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in (write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "a.parquet"):
        reader = CorpusReader([path], layout=layout_of(reads))
        list(reader)
        assert reader.reports[0].unread == named, path
    ids = [{"input_ids": [1, 2, 3], "answer_index": 2}]
    pq.write_table(pa.Table.from_pylist(ids), tmp_path / "i.parquet")
    for path in (write_jsonl(tmp_path / "i.jsonl", ids), tmp_path / "i.parquet"):
        assert read(path)[1][0].unread == {"answer_index": 1}, path


def test_an_empty_mask_is_no_missing_one():
    for row in (
        {"messages": [U, A], "loss_mask": []},
        *({"input_ids": [1, 2], name: []} for name in ("loss_mask", "masked", "labels")),
    ):
        with pytest.raises(BadRow):
            parse(row)
    assert parse({"input_ids": [1, 2], "loss_mask": None}).loss_mask is None
