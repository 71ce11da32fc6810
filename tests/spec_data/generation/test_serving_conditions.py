"""generate records how prompts are rendered, and says what serving must have."""

import json

import pytest

import spec_data
from spec_data.corpus.template import EndTokens, Template
from spec_data.corpus.template_probes import default_system, unstopped_end
from spec_data.shards.dataset_card import dataset_card
from spec_data.shards.reader import HiddenStatesDataset
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.runs import call, options, save_target, write_corpus

SILENT, THINKING = {"enable_thinking": False}, {"enable_thinking": True}
PIRATE = {"role": "system", "content": "You are a pirate."}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target") / "target", template="qwen3")


def corpus(path, thinking: int, pirates: int, rows: int = 20):
    """Write chats of which some have other kwargs, and some a system message."""
    lines = write_corpus(path, rows).read_text().splitlines()
    made = []
    for number, line in enumerate(lines):
        row = json.loads(line)
        row["messages"] = row["messages"][:2]
        if number < pirates:
            row["messages"] = [PIRATE, *row["messages"]]
        made.append(row | {"chat_template_kwargs": THINKING if number < thinking else SILENT})
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@pytest.mark.parametrize(("thinking", "pirates"), [(0, 20), (1, 0), (9, 1)])
def test_shares_are_recorded_and_said(target, tmp_path, thinking, pirates):
    path = corpus(tmp_path / "c.jsonl", thinking, pirates)
    made = call(spec_data.generate, options(target, path, tmp_path / "data"))
    dataset = HiddenStatesDataset(tmp_path / "data")
    identity, masks = dataset.manifest.identity, [row["loss_mask"].sum() for row in dataset]
    counts = {json.dumps(THINKING): thinking, json.dumps(SILENT): 20 - thinking}
    assert identity["template_kwargs_used"] == {k: n for k, n in counts.items() if n}
    assert sum(identity["template_kwargs_tokens"].values()) == sum(masks)
    assert sum(identity["system_tokens"].values()) == sum(masks)
    systems = {"": 20 - pirates, "You are a pirate.": pirates}
    assert identity["system_messages"] == {k: n for k, n in systems.items() if n}
    said = [str(made), made.details(), spec_data.inspect(tmp_path / "data").text]
    said += [str(spec_data.inspect(tmp_path / "data")), dataset_card(dataset.manifest)]
    for text in said:
        plain = " ".join(text.replace("\\", "").split())
        assert json.dumps(SILENT) in plain
        assert ("5 %" in plain) == (thinking == 1 or pirates == 1)
        assert ("45 %" in plain) == (thinking == 9)
        assert ("You are a pirate." in plain) == (pirates > 0)
    facts = spec_data.inspect(tmp_path / "data").facts()
    assert facts["prompts"]["template_kwargs_used"] == identity["template_kwargs_used"]


def test_documents_that_are_dropped_are_not_counted(target, tmp_path):
    path = corpus(tmp_path / "c.jsonl", 0, 0, 6)
    path.write_text(path.read_text() * 2)
    call(spec_data.generate, options(target, path, tmp_path / "data"))
    identity = HiddenStatesDataset(tmp_path / "data").manifest.identity
    assert identity["template_kwargs_used"] == {json.dumps(SILENT): 6}


@pytest.mark.parametrize(
    ("family", "written"),
    [("qwen2.5", "You are Qwen."), ("chatml", ""), ("qwen3", ""), ("llama3", ""), ("gemma2", "")],
)
def test_a_system_message_of_the_template_is_found(family, written):
    assert default_system(Template(tokenizer(family))) == written


def test_a_system_message_of_the_template_is_recorded_and_said(tmp_path):
    target = save_target(tmp_path / "target", template="qwen2.5")
    file = target / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.05}))
    path = write_corpus(tmp_path / "c.jsonl", 8)
    made = call(spec_data.generate, options(target, path, tmp_path / "data"))
    identity = HiddenStatesDataset(tmp_path / "data").manifest.identity
    assert identity["default_system"] == "You are Qwen."
    assert identity["generation_defaults"] == {"repetition_penalty": 1.05}
    assert "system message of the template: 'You are Qwen.'" in str(made)


@pytest.mark.parametrize(
    ("family", "stops", "text"),
    [
        ("odd-end", (), "<|stop|> ("),
        ("chatml", (), None),
        ("glm", ("<|user|>",), None),  # what begins the next turn ends the answer
        ("glm", (), "<|user|> ("),  # if generation stops there
        ("gemma2", (), "<end_of_turn> ("),  # without its generation_config.json
        ("gemma2", ("<end_of_turn>",), None),
    ],
)
def test_an_end_that_stops_no_generation_is_found(family, stops, text):
    tok = tokenizer(family)
    template = Template(tok)
    ends = EndTokens(template, tok.convert_tokens_to_ids(list(stops)))
    found = unstopped_end(template, ends)
    assert (found is None) == (text is None)
    assert text is None or (found.text.startswith(text) and found.stops)


def test_an_end_in_plain_text_stops_nothing_either():
    tok = tokenizer("chatml")
    tok.chat_template = tok.chat_template.replace("<|im_end|>", "<|done|>")
    found = unstopped_end(Template(tok), (tok.eos_token_id,))
    assert found is not None and found.text == "'<|done|>'"
    assert "no single token" in str(found) and "as a stop string" in str(found)


@pytest.mark.parametrize("begins", ["<|im_start|>", "<|user|>", "### user"])
def test_what_begins_the_next_turn_must_stop_generation_where_nothing_ends_an_answer(begins):
    tok = tokenizer("chatml")
    tok.chat_template = (
        "{%- for message in messages %}{{- 'BEGIN\\n' + message.content + '\\n' }}{%- endfor %}"
    ).replace("BEGIN", begins)
    template, begin = Template(tok), tok.convert_tokens_to_ids(begins)
    found = unstopped_end(template, (tok.eos_token_id,))
    assert (found is None) == (begins == "### user")  # a text, of which nothing is known
    if found is not None:
        assert f"by the {begins} ({begin}) of the next turn, at which generation" in str(found)
        assert "add the token to eos_token_id" in str(found)
        assert unstopped_end(template, (tok.eos_token_id, begin)) is None


def test_generate_warns_where_answers_run_on(tmp_path, caplog):
    target = save_target(tmp_path / "target", template="odd-end")
    path = write_corpus(tmp_path / "c.jsonl", 6)
    call(spec_data.generate, options(target, path, tmp_path / "data"))
    (line,) = [r.message for r in caplog.records if "warning[stop-token]" in r.message]
    assert "ends an answer with <|stop|>" in line and "generation_config.json" in line
