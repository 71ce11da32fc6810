"""Would the target say this? The measurement, and the mistakes that it refuses or names."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import spec_data
from spec_data.cli import main
from spec_data.generation import proof
from spec_data.generation.proof import sample_of_sources
from spec_data.shards.errors import ConfigError, CorpusError
from spec_data.shards.likelihood import SUMS, Agreement, AgreementTable, document_sums, summarise
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest
from spec_data.verification.run import examine
from tests.marks import long_but
from tests.spec_data.corpus.templates import CHATML
from tests.spec_data.generation.trained import BOS, TrainedTarget
from tests.spec_data.runs import ON_CPU, arguments, options, run, save_target, write_corpus
from tests.spec_data.shards.integrity_tools import write_manifest

TRAINED = {"layers": "0,1", "max_shard_size": "20KB"}


def reference(target: Path, dataset: HiddenStatesDataset, temperature: float = 1.0) -> dict:
    """Return (tokens, first choices, NLL, own NLL, own share) per source: loops in float64."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    sums: dict[str, list[float]] = {}
    for index in range(len(dataset)):
        row = dataset[index]
        ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        found = sums.setdefault(row["source"], [0.0] * 5)
        for t in range(len(ids) - 1):
            if not mask[t + 1]:
                continue
            z = logits[t]
            log_p = z - z.logsumexp(-1)
            own = (z / temperature).softmax(-1) if temperature else (z == z.max()).double()
            found[0] += 1
            found[1] += int(z.argmax()) == ids[t + 1]
            found[2] -= float(log_p[ids[t + 1]])
            found[3] -= float((own * log_p).sum())
            found[4] += float(own.max())
    return {k: (v[0], v[1], *(x / v[0] for x in v[2:])) for k, v in sums.items()}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma2", {"supervision": "topk:4"}),  # soft-capped logits
        ("cohere", {"packing": "rows"}),  # scaled logits
        ("granite", {"supervision": "logits"}),
        ("gpt2", {"final": "supervised", "codec": "fine"}),
        ("llama", {"packing": "rows", "on_policy": True, "sampling_temperature": 0.5}),
    ],
)
def test_figures_are_those_of_plain_loops_per_source(family, changes, tmp_path, monkeypatch):
    target = save_target(tmp_path / "target", family)
    corpora = (write_corpus(tmp_path / "a.jsonl", 9), tmp_path / "b.jsonl")
    rows = [
        {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": t}]}
        for t in ("because of b", "no idea", "for this reason")
    ]
    corpora[1].write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    if changes.get("on_policy"):  # random weights never wrote this: look at the figures only
        monkeypatch.setattr("spec_data.generation.proof.check_agreement", lambda *a: None)
    manifest = run(target, corpora, tmp_path / "data", **changes)
    assert (manifest.packing.form == "rows") == (changes.get("packing") == "rows")
    dataset = HiddenStatesDataset(tmp_path / "data")
    wanted = reference(target, dataset, changes.get("sampling_temperature", 1.0))
    assert manifest.agreement is not None
    found = manifest.agreement.sources
    assert list(found) == ["a.jsonl", "b.jsonl"]
    for name, (tokens, first, nll, own_nll, own_share) in wanted.items():
        assert (found[name].tokens, found[name].first_choice) == (tokens, first)
        assert found[name].nll == pytest.approx(nll, abs=2e-4)
        assert found[name].own_nll == pytest.approx(own_nll, abs=2e-4)
        assert found[name].own_share == pytest.approx(own_share, abs=2e-4)
    total = manifest.agreement.total
    assert total.tokens == sum(w[0] for w in wanted.values())
    assert total.nll == pytest.approx(
        sum(w[0] * w[2] for w in wanted.values()) / total.tokens, 1e-4
    )


def test_standard_errors_are_those_of_the_definition():
    nll = [torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0]), torch.tensor([0.5, 0.25])]
    sums = [
        document_sums(torch.stack([0 * v, v, 0 * v + 1, 0 * v], -1).double().numpy()) for v in nll
    ]
    found = Agreement.of(np.array(sums))
    every = torch.cat(nll).double()
    spread = [float((v.double() - every.mean()).sum()) for v in nll]
    between = math.sqrt(sum(s * s for s in spread) * 3 / 2) / len(every)
    within = float(every.std()) / math.sqrt(len(every))
    assert found.nll_error == pytest.approx(max(between, within), rel=1e-5)
    assert found.nll == pytest.approx(float(every.mean()), rel=1e-5)


def test_ids_of_another_tokenizer_are_refused_early_and_a_flag_goes_on(trained, tmp_path, caplog):
    corpus = trained.corpus("foreign", trained.foreign())
    given = arguments(options(trained.path, corpus, tmp_path / "data", mask="all", **TRAINED))
    with pytest.raises(
        CorpusError, match=r"foreign\.jsonl.*not this tokenizer's.*--allow-high-nll"
    ) as refused:
        spec_data.generate(**given)
    assert "ln V = 5.97" in str(refused.value)
    assert not list((tmp_path / "data").glob("shards/*.arrow"))
    measure = proof.measure_documents

    def with_a_broken_one(*given):
        figures = measure(*given)
        figures[0] = np.nan
        return figures

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CorpusError, match="allow-high-nll"):
        patch.setattr(proof, "measure_documents", with_a_broken_one)
        spec_data.generate(**given)
    with caplog.at_level(logging.WARNING):
        made = spec_data.generate(
            **given | {"options": replace(given["options"], allow_high_nll=True)}
        )
    assert "these token ids are not this tokenizer's" in caplog.text
    assert any("not this tokenizer's" in w for w in made.warnings)
    assert made.agreement["foreign.jsonl"].nll > math.log(391) + 1
    for text in (made.text, (tmp_path / "data" / "README.md").read_text()):
        assert "not this tokenizer's" in " ".join(text.split())
    found = examine(data=str(tmp_path / "data"), running=ON_CPU)
    assert not found.failures
    assert any("not this tokenizer's" in w for w in found.warnings)


def planted(trained: TrainedTarget, mistake: str) -> tuple[Path, Path]:
    """Return a target and a corpus with one mistake."""
    own = trained.corpus("own", trained.rows)
    if mistake == "shuffled answers":
        return trained.path, trained.corpus("shuffled", trained.shuffled())
    if mistake == "damaged weights":
        return trained.damaged(), own
    if mistake == "doubled BOS":
        return trained.with_template("bos", BOS + CHATML), own
    return trained.with_template("wrong", CHATML.replace("'\\n' + m", "':\\n' + m").replace(
        "assistant\\n", "assistant:\\n")), own  # fmt: skip


MISTAKES = ["shuffled answers", "damaged weights", "doubled BOS", "wrong template"]


@pytest.mark.parametrize("mistake", long_but(["damaged weights", "doubled BOS"], MISTAKES))
def test_mistakes_that_lower_the_share_are_named_with_their_causes(
    mistake, trained, tmp_path, caplog, capsys
):
    target, corpus = planted(trained, mistake)
    changes = {**TRAINED, "on_policy": True, "sampling_temperature": 0.0}
    with pytest.raises(ConfigError, match="did not write these answers"):
        run(target, corpus, tmp_path / "data", **changes)
    assert not list((tmp_path / "data").glob("shards/*.arrow"))
    with caplog.at_level(logging.WARNING):  # without the label the same directory is taken
        manifest = run(target, corpus, tmp_path / "data", **TRAINED)
    assert "warning[answers]: on a sample of" in caplog.text
    for command in (["inspect", str(tmp_path / "data")], ["verify", str(tmp_path / "data")]):
        assert main(command) == 0
        text = " ".join(capsys.readouterr().out.split())
        for cause in ("template", "doubled BOS", "shuffled", "wrongly configured weights"):
            assert cause in text, command
    assert manifest.agreement.total.first_choice < 0.9 * 273
    assert manifest.policy == "off-policy"


def test_what_is_suspicious_is_said_once(trained, tmp_path, capfd):
    """On a sample before the capture; `inspect`, which measured none, says it of all documents."""
    target, corpus = planted(trained, "shuffled answers")
    words = arguments(options(target, corpus, tmp_path / "data", **TRAINED))
    made = spec_data.generate(**words)
    assert made.warnings and made.said == {corpus.name}
    assert "warning[answers]" not in str(made)
    again = spec_data.generate(**words)  # complete already: nothing was measured
    assert str(again).count("warning[answers]") == 1
    assert main(["inspect", str(tmp_path / "data")]) == 0
    assert "shuffled" in capfd.readouterr().out


def test_sound_answers_are_named_on_policy_and_raise_no_warning(trained, tmp_path, caplog, capsys):
    corpus = trained.corpus("own", trained.rows)
    with caplog.at_level(logging.WARNING):
        made = spec_data.generate(
            **arguments(options(trained.path, corpus, tmp_path / "data", **TRAINED))
        )
    engines = "spec_data.generation.setup"  # which cannot serve this target
    assert not [record for record in caplog.records if record.name != engines]
    assert made.policy == "on-policy"
    assert made.warnings == ()
    assert made.agreement["own.jsonl"].share > 0.99
    assert main(["verify", str(tmp_path / "data"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    assert "| own.jsonl | 273 | 100.0% |" in (tmp_path / "data" / "README.md").read_text()


def test_samples_of_the_target_are_on_policy_at_their_temperature_only(trained, tmp_path):
    own = trained.corpus("own", trained.rows)
    damaged = trained.damaged()  # an unsure target: its samples differ from its greedy answers
    writer = TrainedTarget.__new__(TrainedTarget)
    writer.documents, writer.folder = trained.documents, trained.folder
    writer.model = AutoModelForCausalLM.from_pretrained(damaged).eval()
    warm = trained.corpus("warm", writer.sampled(1.0))
    hot = trained.corpus("hot", writer.sampled(2.0))
    changes = {**TRAINED, "on_policy": True}
    made = run(damaged, warm, tmp_path / "1", **changes, sampling_temperature=1.0)
    assert made.policy == "on-policy"
    assert 0.2 < made.agreement.total.share < 0.75
    with pytest.raises(ConfigError, match="pass --sampling-temperature"):
        run(damaged, warm, tmp_path / "2", **changes)
    with pytest.raises(ConfigError, match="at temperature 0"):
        run(damaged, warm, tmp_path / "3", **changes, sampling_temperature=0.0)
    with pytest.raises(ConfigError, match="at temperature 1"):
        run(damaged, hot, tmp_path / "4", **changes, sampling_temperature=1.0)
    assert run(trained.path, own, tmp_path / "5", **changes).policy == "on-policy"


def test_a_label_refused_at_the_end_loses_no_data(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("spec_data.generation.proof.check_agreement", lambda *a: None)
    corpus = trained.corpus("shuffled", trained.shuffled())
    command = ["generate", "--target", str(trained.path), "--corpus", str(corpus), "--on-policy"]
    command += ["--out", str(tmp_path / "data"), "--layers", "0,1", "--codec", "bf16"]
    for _ in range(2):  # the second run finds the dataset complete and says the same
        assert main(command) == 1
        assert "--on-policy was not accepted" in capsys.readouterr().out
    manifest = Manifest.read(tmp_path / "data" / "manifest.json")
    assert manifest.policy == "off-policy"
    assert manifest.settings["on_policy"] is True
    assert main(["verify", str(tmp_path / "data")]) == 0
    assert "--on-policy was not accepted" in capsys.readouterr().out


def test_a_random_target_passes_and_is_called_one(target, corpus, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run(target, corpus, tmp_path / "data")
    assert "behaves like a random model" in caplog.text
    with pytest.raises(ConfigError, match="did not write"):
        run(target, corpus, tmp_path / "2", on_policy=True)


def test_verify_counts_first_choices_again(trained, tmp_path):
    corpus = trained.corpus("own", trained.rows)
    run(trained.path, corpus, tmp_path / "data", **TRAINED)
    file = tmp_path / "data" / "manifest.json"
    raw = json.loads(file.read_text())
    raw["agreement"]["sources"]["own.jsonl"]["first_choice"] -= 1
    write_manifest(tmp_path / "data", raw)
    found = examine(data=str(tmp_path / "data"), running=ON_CPU)
    assert any("272 of 273" in f and "have 273 first choices" in f for f in found.failures)


def agreement(**changes) -> Agreement:
    figures = {"documents": 100, "tokens": 10_000, "first_choice": 7100, "nll": 1.2}
    figures |= {"nll_error": 0.02, "own_nll": 1.15, "excess_error": 0.02, "own_share": 0.7}
    return Agreement(**figures | changes)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (agreement(), None),  # what people write, to a trained target
        (agreement(first_choice=5900), "which is low"),
        (agreement(first_choice=9990, nll=0.02, own_nll=0.1, own_share=0.97), None),
        (agreement(first_choice=8800, nll=0.6, own_nll=0.9, own_share=0.75), "greedy answers"),
        (agreement(first_choice=3, nll=math.log(3000), own_share=0.01), "random model"),
        (agreement(first_choice=90, nll=11.98), "not this tokenizer's"),
        (agreement(tokens=60, first_choice=0, nll=20.0), None),  # too few to tell
    ],
)
def test_what_the_figures_mean(found, words):
    text = found.suspicion(3000, None, on_policy=False)
    assert (text is None) == (words is None) and (words or "") in (text or "")


def test_a_source_far_below_the_others_is_named():
    """Its own figures are usual: rendered wrongly, or answers of another model?"""
    sources = {"good": agreement(first_choice=9600, nll=0.1), "odd": agreement()}
    sources |= {"near": agreement(first_choice=7700), "few": agreement(tokens=60, first_choice=0)}
    table = AgreementTable(total=agreement(tokens=30_060), sources=sources)
    said = [t for t in table.suspicions(3000, None, True, False) if "compare how" in t]
    (text,) = said
    assert text.startswith("odd: 71.0% first choices, but good has 96.0%: compare how the two")
    alone = AgreementTable(total=agreement(), sources={"odd": agreement()})
    assert not alone.suspicions(3000, None, True, False)


def test_a_sample_has_documents_of_every_source_spread_over_it():
    chosen = sample_of_sources(["b"] * 100 + ["a"] + ["b"] * 100, [])
    assert 100 in chosen and len(chosen) == 17
    assert chosen[0] < 20 and chosen[-1] > 180
    names = [f"{i:05}.txt" for i in range(20_000)]  # a directory of texts
    chosen = sample_of_sources(names, [7])
    assert 7 in chosen and 100 < len(chosen) <= 257 and chosen[-1] > 19_000
    figures = np.zeros((len(names), SUMS))
    figures[:, 0] = 1
    found = summarise(figures, names)
    assert list(found.sources) == names and found.total.tokens == 20_000
