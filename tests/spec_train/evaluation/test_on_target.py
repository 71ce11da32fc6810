"""`spec-train eval` with the target: real decoding is lossless, and its report is correct."""

import json
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

import spec_train
from spec_data.shards.errors import ConfigError, DraftError, MissingError, RunError
from spec_train.drafts.dspark.options import DSparkOptions
from spec_train.evaluation import evaluate, on_target
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.factory import tiny_dataset, tiny_llama
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import (
    STEPS,
    STOP,
    VOCAB,
    config_of,
    draft_for,
    respond,
    run_eval,
)

target, prompts = evaluate_tools.target, evaluate_tools.prompts
trained, workplace = evaluate_tools.trained, evaluate_tools.workplace


def test_real_decoding_end_to_end_and_what_its_own_responses_predict(
    workplace, target, prompts, tmp_path, capsys
):
    """Decode, make a dataset of the responses: simulated on it, the acceptance is the measured."""
    report = run_eval(config_of(workplace))
    assert json.loads(json.dumps(report)) == report
    assert report["responses"] == 8  # six prompts and two turns
    assert report["identical"] + report["ties"] == 8 and report["ties"] <= 1
    assert report["different"] == [] and report["warnings"] == []
    assert report["acceptance_length"] == report["emitted"] / report["rounds"] > 1.1
    assert report["tokens"] == report["emitted"] + report["responses"]
    assert report["draft_tokens"] == STEPS
    assert report["tokens_per_second"] > 0 and report["speedup"] > 0
    shown = capsys.readouterr().out
    assert f"{report['acceptance_length']:.3f}" in shown and "8/8" in shown

    documents = []
    for sample in report["samples"]:
        context, *answer = sample["parts"]
        ids, mask = respond(target, context["tokens"])
        tokens = [t for part in answer for t in part.get("emitted", part.get("tokens"))]
        assert ids == context["tokens"] + tokens
        documents.append((ids, mask, [("user", 0, 1)]))
    assert all(documents[n][0][: len(p)] == p for n, p in enumerate(prompts[:6]))
    first, second = documents[6][0], documents[7][0]
    fed_back = [t for t in first if t not in (0, STOP)]  # decoded without special tokens
    assert second[: len(fed_back)] == fed_back
    tiny_dataset(tmp_path / "data", layers=(0, 1, 2), model=target, documents=documents)
    data = {"draft": str(workplace / "draft"), "data": str(tmp_path / "data")}
    simulated = run_eval({**data, "device": "cpu"})
    assert simulated["data"]["on_policy"] == 1.0
    # stored states are bfloat16, which may flip a draft here and there
    assert simulated["acceptance_length"] == pytest.approx(report["acceptance_length"], abs=0.1)
    assert "of 256 tokens are the target's own" in capsys.readouterr().out
    both = config_of(workplace, data=str(tmp_path / "data"), limit=2)
    for others in ({}, {"temperature": 1.0}, {"tree_tokens": 4}):  # greedy chains are simulated
        assert ("gap" in run_eval(both | others)) == (not others)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't")],
)
def test_full_memory_names_the_options_that_take_less(
    workplace, target, tmp_path, monkeypatch, error
):
    def full(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "evaluate_target", full)
        said = r"memory in real decoding \(.*\). Run .* --max-new-tokens below \d+, .*--tree-tokens"
        with pytest.raises(RunError, match=said):
            run_eval(config_of(workplace, tree_tokens=4))
    tiny_dataset(tmp_path / "data", layers=(0, 1, 2), model=target)
    monkeypatch.setattr(evaluate, "evaluate_data", full)
    with pytest.raises(RunError, match=r"memory in the measurement on --data .*--dtype bfloat16"):
        run_eval({"draft": str(workplace / "draft"), "data": str(tmp_path / "data")})


def test_sampling_reports_no_identity_and_repeats_itself(workplace, monkeypatch):
    runs = []
    for seed in (1, 1, 2):
        monkeypatch.setattr(on_target, "SEED", seed)
        runs.append(run_eval(config_of(workplace, temperature=1.0, limit=2)))
    assert runs[0]["identical"] is runs[0]["ties"] is runs[0]["different"] is None
    assert runs[0]["accept_rate"] == runs[1]["accept_rate"]
    assert runs[0]["accept_rate"] != runs[2]["accept_rate"]


def test_a_wrong_token_fails_the_run(workplace, monkeypatch):
    honest = on_target.decode_speculative

    def liar(*arguments: Any, **options: Any):
        generation = honest(*arguments, **options)
        generation.tokens[3] = (generation.tokens[3] + 1) % VOCAB
        return generation

    monkeypatch.setattr(on_target, "decode_speculative", liar)
    config = config_of(workplace, limit=3)
    with pytest.raises(RunError, match=r"3 responses(.|\n)*jsonl:1: token 3 is") as caught:
        run_eval(config)
    assert caught.value.exit_code == 1


def test_prompts_that_fill_the_context_are_counted(workplace, tmp_path, caplog):
    rows = [{"prompt": "w9 " * 600}, {"prompt": "w9 w10"}, {"prompt": "w9 " * 505}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8")
    report = run_eval(config_of(workplace, prompts=str(tmp_path / "p.jsonl")))
    assert report["too_long"] == [f"{tmp_path / 'p.jsonl'}:1"]
    assert f"warning[long-prompt]: {tmp_path / 'p.jsonl'}:1: skipped" in caplog.text
    assert report["responses"] == report["identical"] == 2


def test_nothing_measured_is_an_error_or_null_and_never_a_length_of_one(
    workplace, target, tmp_path, capsys
):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "w9 " * 600}) + "\n")
    config = config_of(workplace, prompts=str(tmp_path / "p.jsonl"))
    with pytest.raises(RunError, match="none of 1 prompts leaves room for an answer"):
        run_eval(config)
    capsys.readouterr()
    report = run_eval(config_of(workplace, max_new_tokens=1, limit=2))
    assert (report["responses"], report["rounds"], report["acceptance_length"]) == (2, 0, None)
    (warning,) = report["warnings"]
    assert "no draft was verified" in warning
    shown = capsys.readouterr().out
    (line,) = [row for row in shown.splitlines() if "acceptance length" in row]
    assert line.split()[2] == "-" and "speed-up" not in shown  # of a draft that took no part

    documents = [([9, 10, 11, 12], [0, 0, 0, 1], [("user", 0, 3), ("assistant", 3, 4)])] * 2
    data = tiny_dataset(tmp_path / "short", layers=(0, 1, 2), model=target, documents=documents)
    report = run_eval(dict(draft=config["draft"], data=str(data), device="cpu"))
    assert report["acceptance_length"] is report["data"]["simulated"]["acceptance_length"] is None
    assert report["data"]["teacher_forced"]["acceptance_length"] is None
    (warning,) = report["warnings"]
    assert "nothing was verified" in warning


def test_a_sweep_without_a_drafted_token_has_no_costs(workplace, capsys):
    report = run_eval(config_of(workplace, max_new_tokens=1, limit=2, draft_tokens="1,2"))
    assert [line["modelled"]["speedup"] for line in report["sweep"]] == [None, None]
    assert "modelled unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ratio", "said"), [(0.2, "costs 0.2 target"), (0, "with the costs measured for each")]
)
def test_a_sweep_names_the_costs_that_all_its_lines_have(workplace, capsys, ratio, said):
    run_eval(config_of(workplace, limit=2, max_new_tokens=8, draft_tokens="1,2", cost_ratio=ratio))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("drafted tokens")]
    assert said in line


def test_documents_that_cannot_be_chosen_are_said_before_anything_is_decoded(
    workplace, target, tmp_path, monkeypatch
):
    data = tiny_dataset(tmp_path / "data", n_docs=2, layers=(0, 1, 2), model=target)
    monkeypatch.setattr("spec_train.evaluation.evaluate.load_target", pytest.fail)
    with pytest.raises(ConfigError, match="--split validation: only a run directory"):
        run_eval(config_of(workplace, data=str(data), split="validation"))


def test_what_a_published_draft_lacks_comes_from_a_target_that_is_downloaded(
    workplace, target, tmp_path, monkeypatch
):
    data = tiny_dataset(tmp_path / "data", n_docs=2, layers=(0, 1, 2), model=target)
    training = Training(data=str(data), out=str(tmp_path / "run"), steps=0, device="cpu")
    fit("dspark", training, DSparkOptions(num_layers=1, block_size=3, num_anchors=4))
    spec_train.export(tmp_path / "run", tmp_path / "pub", "vllm", target=workplace / "target")
    asked = []

    def download(name, *, local_files_only=False, **options):
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        asked.append(name)
        return str(workplace / "target")

    monkeypatch.setattr("spec_data.models.resolve.snapshot_download", download)
    given = {"draft": str(tmp_path / "pub"), "target": "some/model", "limit": 2}
    report = run_eval(config_of(workplace, **given))
    assert report["responses"] == report["identical"] == 2 and set(asked) == {"some/model"}


def test_a_draft_of_another_target_is_refused_or_warned_about(workplace, tmp_path, target):
    tiny_llama(VOCAB, hidden=16).save_pretrained(tmp_path / "narrow")
    tiny_llama(80).save_pretrained(tmp_path / "wide")
    tiny_llama(VOCAB, layers=3).save_pretrained(tmp_path / "shallow")
    tiny_llama(VOCAB, seed=9).save_pretrained(tmp_path / "other")
    for name in ("narrow", "wide", "shallow", "other"):
        for file in (workplace / "target").glob("*token*"):
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        template = workplace / "target" / "chat_template.jinja"
        (tmp_path / name / template.name).write_bytes(template.read_bytes())
    for name, said in (
        ("narrow", "target of hidden size 32, --target has 16"),
        ("wide", "target of vocabulary 64, --target has 80"),
        ("shallow", "layer id 2, the last of the target's 3 decoder blocks"),
    ):
        with pytest.raises(DraftError, match=said):
            run_eval(config_of(workplace, target=str(tmp_path / name)))
    report = run_eval(config_of(workplace, target=str(tmp_path / "other"), limit=1))
    (warning,) = report["warnings"]
    assert "embedding differs from the target's" in warning
    with pytest.raises(MissingError, match=r"target .*nowhere"):
        run_eval(config_of(workplace, target=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(("trained_embedding", "moved"), [(False, 0.1), (True, 0.1), (True, 9.0)])
def test_a_trained_embedding_is_not_taken_for_another_target(
    target, trained_embedding: bool, moved: float
) -> None:
    draft = draft_for("eagle3", target)
    draft.update_config(train_embeddings=trained_embedding)
    torch.manual_seed(4)
    own = draft.embed_tokens.weight.detach()
    draft.embed_tokens.weight = torch.nn.Parameter(own + moved * own.std() * torch.randn_like(own))
    warnings = on_target.check_draft(draft, target)
    assert bool(warnings) == (not trained_embedding or moved > 1)
