"""No prompt of a held-out document is trained on: the texts decide, by plain loops."""

import json
import shutil
from pathlib import Path

import pytest

import spec_data
from spec_data.shards.prompt_keys import PromptKeys
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.seal import seal
from spec_train.data.mixture import open_documents
from spec_train.data.splits import HeldOut, make_splits
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.evaluation.on_dataset import choose_documents
from spec_train.evaluation.run_record import read_run
from spec_train.options.data_option import parse_sources
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.runs import run, save_target

PROMPTS, SAMPLES = 20, 4
CUT = 48  # tokens: some answers of the cut data set are shorter than they were


def chat(prompt: int, answer: str, system: str = "", blanks: str = "") -> dict:
    first = [{"role": "system", "content": system}] if system else []
    question = {"role": "user", "content": f"{blanks}What is  {prompt} plus one?{blanks}"}
    return {"messages": [*first, question, {"role": "assistant", "content": answer}]}


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Samples of each prompt; most prompts with a system prompt; others, cut; older ones."""
    place, numbers = tmp_path_factory.mktemp("prompts"), range(PROMPTS)
    target = save_target(place / "target")
    corpora = {
        "samples": [chat(p, f"it is {p + 1}, {s} times") for p in numbers for s in range(SAMPLES)],
        "system": [chat(p, f"{p + 1}", "You add.", "\n ") for p in numbers if p % 5],
        "long": [chat(p, f"so {p} and one are {p + 1} " * 4) for p in numbers],
    }
    for name, rows in corpora.items():
        given = {"max_length": CUT} if name == "long" else {}
        run(target, write(place / f"{name}.jsonl", rows), place / name, layers="0", **given)
    shutil.copytree(place / "samples", place / "older")
    manifest = HiddenStatesDataset(place / "samples").manifest
    seal(place / "older", manifest.changed(files={}, card=None), manifest.shards)
    spec_data.merge([place / "samples", place / "system"], place / "merged")
    spec_data.select(place / "samples", place / "selected", sample=0.6)
    spec_data.copy(place / "merged", place / "copied")
    return place


def user_text(dataset, document: int) -> str:
    """The user message as chatml has it, by another code: its tokens as text, cut at the tags."""
    part = dataset.text(document).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    return " ".join(part.split())


def sides(config: Training, rule: HeldOut | None = None) -> tuple[list[str], list[str]]:
    """The user texts of the documents that are trained on, and of those held out."""
    data = open_documents(parse_sources(config.data))
    splits = make_splits(data, config, rule=rule)
    parts = getattr(data, "datasets", (data,))
    texts = [user_text(part, d) for part in parts for d in range(len(part))]
    train = set(splits.train.rows.tolist())
    held = [text for row, text in enumerate(texts) if row not in train]
    assert splits.held_out == len(held)
    assert splits.held_prompts == len(held if rule else set(held))
    return [texts[row] for row in train], held


@pytest.mark.parametrize(
    "names",
    [
        ["samples"], ["older"], ["merged"], ["selected"], ["copied"], ["samples", "system"],
        ["older", "system"], ["selected", "long"], ["samples", "older", "system", "long"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_no_user_text_of_a_held_out_document_is_trained_on(place, tmp_path, names):
    for seed in range(3):
        data = [str(place / name) for name in names]
        config = Training(data=data, out=str(tmp_path), validation=0.2, split_seed=seed)
        trained, held = sides(config)
        assert held and trained and not set(held) & set(trained)
        assert len(held) < 0.5 * len(held + trained)


def test_by_document_answers_to_held_out_prompts_were_trained_on(place, tmp_path):
    """The premise of the test above; a run of an earlier release resumes so."""
    config = Training(data=str(place / "samples"), out=str(tmp_path), validation=0.2)
    rule = HeldOut.of({"split_rule": "tokens-1", "split_border": 2**64 // 5})
    trained, held = sides(config, rule)
    assert len(set(held) & set(trained)) > 0.5 * len(set(held))


def test_every_way_to_a_prompt_gives_the_same_number(place):
    """Of its messages when it is generated; of its tokens in older data; in every view."""
    sets = {path: HiddenStatesDataset(place / path) for path in
            ("samples", "older", "system", "long", "merged", "selected", "copied")}  # fmt: skip
    versions = {name: data.manifest.format_version for name, data in sets.items()}
    assert versions == dict.fromkeys(sets, "1.1") | {"older": "1.0"}
    known = {}
    for name, data in sets.items():
        for document, number in enumerate(data.prompts.tolist()):
            assert known.setdefault(user_text(data, document), number) == number, name
    assert len(set(known.values())) == len(known) == PROMPTS
    both = spec_data.merge([place / "older", place / "system"], place / "of-both")
    assert HiddenStatesDataset(both.path).manifest.format_version == "1.0"
    assert set(HiddenStatesDataset(both.path).prompts.tolist()) == set(known.values())


def test_texts_that_only_look_different_are_one_prompt():
    keys = PromptKeys(tokenizer("chatml"))
    message = {"role": "user", "content": "Name  a\nPrime. "}
    parts = {"role": "user", "content": [{"type": "text", "text": "name a prime."}]}
    rendered = "<|im_start|>user\nNAME a prime.<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    numbers = [
        keys.of_messages([{"role": "system", "content": "x"}, message, parts]),
        keys.of_messages([parts]),
        keys.of_text(rendered),
    ]
    assert len(set(numbers)) == 1
    assert keys.of_messages([{"role": "user", "content": "Name a prime"}]) != numbers[0]
    assert keys.of_text("a" * 512 + "b") == keys.of_text("a" * 512 + "c")  # a beginning decides
    assert keys.of_text("a") != keys.of_text("b")
    lonely = PromptKeys(None)
    assert lonely.of_tokens([1, 2, 3, 4], 2) == lonely.of_tokens([1, 2, 9], 2)
    assert lonely.of_tokens([1, 2, 3], 0) != lonely.of_tokens([1, 2, 4], 0)


def test_a_message_that_most_documents_begin_with_is_split_by_document(place, tmp_path, caplog):
    """One user message for all, and what is asked in the system prompt: no side would be left."""
    rows = [chat(0, f"{p + 1}", f"The number {p}") for p in range(24)]
    rows += [chat(p, "some") for p in range(1, 6)]
    run(place / "target", write(tmp_path / "a.jsonl", rows), tmp_path / "same", layers="0")
    given = Training(data=str(tmp_path / "same"), out=str(tmp_path / "run"), validation=0.3,
                     steps=1, device="cpu", seq_len=64)  # fmt: skip
    fit("eagle3", given, Eagle3Options(ttt_steps=1, draft_vocab_size=0))
    assert "warning[held-out]: 24 of 29 documents begin with the same user message" in caplog.text
    identity = json.loads((tmp_path / "run" / "run.json").read_text())["identity"]
    dataset = HiddenStatesDataset(tmp_path / "same")
    assert int(identity["split_common"], 16) == dataset.prompts[0]
    facts = read_run(tmp_path / "run", tmp_path / "run" / "last")
    held, trained = (choose_documents(dataset, side, facts)[0] for side in ("validation", "train"))
    assert 1 < len(held) < len(trained) and sorted(held + trained) == list(range(29))
    assert fit("eagle3", given, Eagle3Options(ttt_steps=1, draft_vocab_size=0)).finished


def test_other_answers_to_trained_prompts_are_not_measured_as_new(place, tmp_path):
    """`eval --data` on the samples of a run's prompts: only those of held-out prompts."""
    given = Training(data=str(place / "samples"), out=str(tmp_path / "run"), validation=0.2,
                     steps=1, device="cpu", seq_len=64)  # fmt: skip
    fit("eagle3", given, Eagle3Options(ttt_steps=1, draft_vocab_size=0))
    facts = read_run(tmp_path / "run", tmp_path / "run" / "best")
    trained, _ = sides(given)
    for name in ("samples", "system", "long", "older"):
        dataset = HiddenStatesDataset(place / name)
        chosen, split = choose_documents(dataset, "auto", facts)
        texts = {user_text(dataset, document) for document in chosen}
        assert split == "validation" and texts and not texts & set(trained), name
    new = [chat(p, f"{p + 1}") for p in range(PROMPTS, PROMPTS + 5)]
    more = write(tmp_path / "more.jsonl", [chat(0, "one"), *new])
    run(place / "target", more, tmp_path / "new", layers="0")
    dataset = HiddenStatesDataset(tmp_path / "new")
    assert user_text(dataset, 0) in trained  # the premise
    assert choose_documents(dataset, "auto", facts)[0] == [1, 2, 3, 4, 5]
