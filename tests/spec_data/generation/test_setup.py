"""What happens before a target is loaded: options are checked, and the plan is made."""

import json
import logging
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from spec_data.commands.regenerate import regenerate
from spec_data.generation import capture, proof
from spec_data.generation.options import CaptureOptions
from spec_data.generation.setup import make_plan, set_up
from spec_data.shards.errors import ConfigError, CorpusError, RunError
from spec_data.shards.files import remove
from spec_data.shards.reader import HiddenStatesDataset
from tests.marks import long_but
from tests.spec_data.corpus.templates import CHATML, GEMMA2, tokenizer
from tests.spec_data.runs import (
    digests,
    estimate_with,
    inputs_of,
    options,
    run,
    save_target,
    setup_of,
    write_corpus,
)
from tests.spec_train.fitted import edit


def setup_at(target, corpus, out, **changes):
    return setup_of(**options(target, corpus, out, **changes))


def plan_at(target, corpus, out, **changes):
    return make_plan(*inputs_of(**options(target, corpus, out, **changes)))


# --- rows that the template refuses ---


def strict_target(target, path):
    """Return the target with a template that refuses system messages."""
    path.mkdir()
    for file in target.iterdir():
        (path / file.name).symlink_to(file)
    tok = tokenizer("chatml")
    tok.chat_template = GEMMA2.replace("start_of_turn", "im_start").replace("end_of_turn", "im_end")
    for file in path.glob("*token*"):
        file.unlink()
    (path / "chat_template.jinja").unlink(missing_ok=True)
    tok.save_pretrained(path)
    return path


def test_the_plan_counts_what_the_template_leaves_out(target, tmp_path, caplog):
    """By kind, in the log and in the counts."""
    deaf = strict_target(target, tmp_path / "deaf")
    template = CHATML.replace("messages %}", "messages if message.role != 'developer' %}")
    (deaf / "chat_template.jinja").write_text(template)
    user, told = {"role": "user", "content": "hi"}, {"role": "developer", "content": "be brief"}
    rows = [
        {"messages": [told, user, {"role": "assistant", "content": f"yes {i}"}], "id": i}
        for i in range(17)
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level(logging.INFO):
        rows, setup = inputs_of(**options(deaf, tmp_path / "c.jsonl", tmp_path / "out"))
        plan = make_plan(rows, setup)
    assert "the chat template leaves out 17 developer messages" in caplog.text
    assert "c.jsonl: columns that are not used: id" in caplog.text
    (source,) = plan.corpus
    assert source.unused_columns == ["id"]
    assert plan.counts.rendering["left out by the template: developer messages"] == 17
    changed = replace(setup.options, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ConfigError, match="does not read enable_thinking"):
        make_plan(rows, replace(setup, options=changed))


def chats(path, good, refused):
    """Write a corpus of two kinds of rows; the refused ones come last."""
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    rows = [[user, answer | {"content": f"yes {i}"}] for i in range(good)]
    rows += [[{"role": "system", "content": "s"}, user, answer]] * refused
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in rows))
    return path


def test_a_template_that_refuses_many_rows_stops_the_plan(target, tmp_path):
    strict = strict_target(target, tmp_path / "strict")
    file = chats(tmp_path / "c.jsonl", good=6, refused=54)
    with pytest.raises(CorpusError, match=r"54 of 60 rows(.|\n)*c\.jsonl:7: .*System role"):
        plan_at(strict, file, tmp_path / "out")
    file = chats(tmp_path / "c.jsonl", good=299, refused=1)
    plan = plan_at(strict, file, tmp_path / "out")
    assert plan.counts.unrendered == {"template-error": 1} and plan.corpus[0].unrendered == 1
    assert plan.counts.unrendered_examples["template-error"][0].startswith("c.jsonl:300: ")
    with pytest.raises(CorpusError, match=r"c\.jsonl:300: .*System role"):
        plan_at(strict, file, tmp_path / "out", max_bad_rows=0)


# --- options against the target and the corpus ---


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_documents_end_where_the_targets_context_ends(tmp_path, caplog, family):
    target = save_target(tmp_path / "target", family)  # made for 256 positions
    long = {"role": "assistant", "content": "yes " * 600}
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, long]}) + "\n")
    caplog.set_level(logging.INFO)
    plan = plan_at(target, file, tmp_path / "out", max_length=1000)
    assert "cut to 256 tokens, not 1000" in caplog.text
    assert plan.lengths.tolist() == [256]
    assert plan.counts.cut == 1 and plan.counts.tokens_cut > 300
    assert plan.settings["max_length"] == 256
    assert setup_at(target, file, tmp_path / "out", max_length=100).options.max_length == 100


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_a_context_counts_as_what_yarn_scaled_it_to(target, corpus, tmp_path, kind):
    """The factor of llama3 is no scale of the context: that of Llama 3.2 is twice too large."""
    scaled = tmp_path / "scaled"
    shutil.copytree(target, scaled)
    config = json.loads((scaled / "config.json").read_text())
    config["rope_parameters"] |= {
        "rope_type": kind,
        "factor": 4.0,
        "original_max_position_embeddings": 200,
        **({"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}),
    }
    (scaled / "config.json").write_text(json.dumps(config))
    found = setup_at(scaled, corpus, tmp_path / "out", max_length=1000).options.max_length
    assert found == (800 if kind == "yarn" else config["max_position_embeddings"])


def test_more_top_logits_than_the_vocabulary_has_are_refused(target, corpus, tmp_path):
    size = setup_at(target, corpus, tmp_path / "out").vocab_size
    setup_at(target, corpus, tmp_path / "out", supervision=f"topk:{size}")
    with pytest.raises(ConfigError, match=f"topk:{size + 1}: the target has {size} logits"):
        setup_at(target, corpus, tmp_path / "out", supervision=f"topk:{size + 1}")


def test_out_inside_a_corpus_directory_is_refused(target, tmp_path, monkeypatch):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_corpus(folder / "chats.jsonl", 3)
    monkeypatch.chdir(folder)
    for corpus, out in ((folder, folder), (f"{folder}@train", folder / "a/../b"), (".", "b/data")):
        with pytest.raises(ConfigError, match="lies in the corpus directory"):
            setup_at(target, corpus, out)
    setup_at(target, folder, tmp_path / "corpus-data")
    setup_at(target, folder / "chats.jsonl", folder / "data")  # a file is not a directory


# --- resuming, and replacing a plan ---


def test_a_run_resumes_however_the_path_of_its_corpus_is_written(target, tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "chats.jsonl", 12)
    copy = write_corpus(tmp_path / "copy.jsonl", 12)
    out = tmp_path / "data"
    monkeypatch.chdir(tmp_path)
    run(target, "chats.jsonl", out, workers="0/2")
    run(target, corpus, out, workers="1/2")
    run(target, copy, out)
    assert HiddenStatesDataset(out)[0]["source"] == "chats.jsonl"
    run(target, corpus, tmp_path / "again")
    assert digests(tmp_path / "again") == digests(out)
    texts = [p.read_bytes() for p in out.rglob("*") if p.is_file()]
    assert not any(str(tmp_path).encode() in text for text in texts)


def failing(*_, **__):
    raise RunError("the target does not fit")


def test_the_plan_of_a_run_that_captured_nothing_is_replaced(
    target, corpus, tmp_path, monkeypatch, caplog
):
    out = tmp_path / "data"
    monkeypatch.setattr(capture, "unit_forwards", failing)
    with pytest.raises(RunError, match="does not fit"):
        run(target, corpus, out, codec="fine")
    monkeypatch.undo()
    assert (out / ".generate" / "target.json").is_file() and (out / "target").is_dir()
    run(target, corpus, out, layers="1,3")
    assert "warning[replanned]" in caplog.text and "layers: [0, 2, 4] -> [1, 3]" in caplog.text
    run(target, corpus, tmp_path / "fresh", layers="1,3")
    assert digests(out) == digests(tmp_path / "fresh")


@pytest.mark.parametrize("layers", long_but(["0,2,4"], ["0,2,4", "1,3"]))
def test_removing_a_plan_is_finished_after_a_crash(target, corpus, tmp_path, monkeypatch, layers):
    """With the new settings, or with the old ones."""
    out = tmp_path / "data"
    monkeypatch.setattr(capture, "unit_forwards", failing)
    with pytest.raises(RunError):
        run(target, corpus, out, codec="fine")
    monkeypatch.undo()
    removed = []

    def crash(path):
        if len(removed) == 4:
            raise OSError("no power")
        removed.append(path)
        remove(path)

    monkeypatch.setattr("spec_data.generation.setup.remove", crash)
    with pytest.raises(OSError, match="no power"):
        run(target, corpus, out, layers="1,3")
    monkeypatch.undo()
    given = {"layers": layers, "codec": "fine" if layers == "0,2,4" else "bf16"}
    run(target, corpus, out, **given)
    run(target, corpus, tmp_path / "fresh", **given)
    assert digests(out) == digests(tmp_path / "fresh")


def test_a_form_of_gpus_is_not_resumed_on_a_cpu(monkeypatch, tmp_path):
    proven = SimpleNamespace(columns=(), codec=None, packing=SimpleNamespace(form="varlen"))
    monkeypatch.setattr(proof, "prove_target", lambda *_: proven)
    target = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(RunError, match=r"begun on a GPU.*varlen"):
        proof.prepare_capture(None, None, target, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("USE_FSDP", "true", "enables FSDP.*pass --device-map auto"),
        ("MIXED_PRECISION", "bf16", "the dtype of the target's files; pass --dtype bfloat16"),
        ("MIXED_PRECISION", "fp16", "launch with --mixed_precision no"),
    ],
)
def test_what_accelerate_is_asked_for_is_refused_by_what_loads_a_target(
    tmp_path, monkeypatch, name, value, said
):
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    save_target(tmp_path / "target")
    corpus = write_corpus(tmp_path / "c.jsonl", 4)
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "target", corpus, tmp_path / "data")
    said = said.replace("--device-map auto", "--server")
    with pytest.raises(ConfigError, match=said):
        regenerate(str(corpus), str(tmp_path / "a.jsonl"), str(tmp_path / "target"))


@pytest.mark.parametrize("given", [True, False])
def test_a_length_beyond_the_context_is_a_warning_if_it_was_given(tmp_path, caplog, given):
    save_target(tmp_path / "target")
    edit(tmp_path / "target" / "config.json", max_position_embeddings=64)
    write_corpus(tmp_path / "c.jsonl", 4)
    length = {"max_length": 2048} if given else {}
    with caplog.at_level("INFO"):
        made = set_up(
            str(tmp_path / "target"),
            [str(tmp_path / "c.jsonl")],
            CaptureOptions(layers=[0], **length),
        )
    assert made.options.max_length == 64
    (line,) = [r for r in caplog.records if "documents are cut to 64 tokens, not" in r.getMessage()]
    assert line.levelname == ("WARNING" if given else "INFO")
    assert line.getMessage().startswith("warning[context]: ") == given


@pytest.mark.parametrize(
    ("context", "max_length", "said"),
    [
        (8, 2048, "the context of the target ends at 8 tokens .* a larger --max-length changes no"),
        (512, 8, "all answers begin after 8 tokens: raise --max-length"),
    ],
)
def test_a_corpus_without_answers_within_the_length_says_which_length_it_is(
    tmp_path, context, max_length, said
):
    save_target(tmp_path / "target")
    edit(tmp_path / "target" / "config.json", max_position_embeddings=context)
    write_corpus(tmp_path / "c.jsonl", 4)
    given = options(tmp_path / "target", tmp_path / "c.jsonl", tmp_path / "data")
    with pytest.raises(CorpusError, match=f"no document is left .*{said}"):
        estimate_with(**given | {"max_length": max_length})
