"""`spec-train eval`: simulated acceptance is that of real decoding, and nothing is lost."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spec_data.shards.errors import ConfigError, DraftError, MissingError, RunError
from spec_data.shards.head import HeadSpec
from spec_data.shards.packing import row_layout
from spec_data.shards.plan import SPLIT_RULE
from spec_data.shards.reader import HiddenStatesDataset
from spec_train import evaluate_data, evaluate_target
from spec_train.batch import DraftBatch
from spec_train.config import Eagle3Options, EvalConfig
from spec_train.decode import decode_plain, decode_speculative
from spec_train.drafts.eagle3 import Eagle3Draft, serving_chains
from spec_train.drafts.eagle3_config import Eagle3Config
from spec_train.evaluate import run_eval, trained_rendering
from spec_train.evaluate_data import choose_documents, serving_sums
from spec_train.head import TargetHead
from spec_train.sampling import Greedy, make_sampler
from spec_train.serving import judge_chains, supervised_spans, walk_rounds
from tests.factory import states_of, tiny_dataset, tiny_llama

VOCAB, LAYERS, STEPS, LIMIT = 64, (0, 2), 4, 32
STOP = 5
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def batch_of(model: Any, documents: list[tuple[list[int], list[int]]]) -> DraftBatch:
    """A pack of documents in float32, straight from ordinary forwards."""
    parts: dict[str, list[torch.Tensor]] = {}
    for ids, mask in documents:
        columns = states_of(model, ids, LAYERS)
        columns |= {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask).bool()}
        for name, values in columns.items():
            parts.setdefault(name, []).append(values)
    joined = {name: torch.cat(values)[None] for name, values in parts.items()}
    lengths = [[len(ids) for ids, _ in documents]]
    document_ids, position_ids = row_layout(lengths, sum(lengths[0]))
    hidden = {name: joined.pop(name) for name in list(joined) if name.startswith("hidden.")}
    return DraftBatch(
        **joined,
        position_ids=position_ids,
        document_ids=document_ids,
        hidden=hidden,
        rows=[list(range(len(documents)))],
    )


def head_of(model: Any) -> TargetHead:
    embedding = model.get_input_embeddings().weight.data
    spec = HeadSpec(vocab_size=VOCAB, hidden_size=embedding.shape[1], tied=False)
    return TargetHead(spec, embedding, model.get_output_embeddings().weight.data)


def make_draft(model: Any, draft_vocab: int = VOCAB) -> Eagle3Draft:
    torch.manual_seed(1)
    options = Eagle3Options(ttt_steps=STEPS, draft_vocab_size=draft_vocab)
    config = Eagle3Config.from_target(
        model.config.to_dict(),
        layers=LAYERS,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        options=options,
        dtype="float32",
        origin={"chat_template_kwargs": {}},
    )
    draft = Eagle3Draft(config, options)
    draft.adopt(head_of(model))
    return draft.eval()


def respond(model: Any, prompt: list[int]) -> tuple[list[int], list[int]]:
    response = decode_plain(model, prompt, Greedy(), LIMIT, {STOP}).tokens
    return prompt + response, [0] * len(prompt) + [1] * len(response)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_llama(VOCAB).requires_grad_(False)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """User messages of random words, as the template renders them: <user> ... <assistant>."""
    rng = np.random.default_rng(0)
    words = [rng.integers(8, VOCAB, int(rng.integers(2, 9))).tolist() for _ in range(16)]
    return [[1, *w, 2] for w in words]


@pytest.fixture(scope="module")
def trained(target, prompts) -> Eagle3Draft:
    """A draft that is sometimes right: a few dozen steps on the target's own responses."""
    torch.set_num_threads(1)
    draft, head = make_draft(target).train(), head_of(target)
    batch = batch_of(target, [respond(target, p) for p in prompts[:8]])
    optimizer = torch.optim.AdamW(draft.trainable_parameters(), lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        draft.loss(batch, head, draft.slot_counts(batch)).loss.backward()
        optimizer.step()
    return draft.eval()


def test_on_the_targets_own_responses_the_walk_is_the_real_decoding(target, prompts, trained):
    """The law: the same rounds, the same tokens, the same acceptance length; no target needed."""
    real, lengths = [], set()
    total = evaluate_data.ServingSums.zero(STEPS)
    for prompt in prompts:
        got = decode_speculative(target, trained, LAYERS, prompt, Greedy(), LIMIT, STEPS, {STOP})
        document = prompt + got.tokens, [0] * len(prompt) + [1] * len(got.tokens)
        assert document == respond(target, prompt)
        batch = batch_of(target, [document])
        chains = serving_chains(trained, batch, None, STEPS)
        columns = (chains, batch.input_ids, batch.target_argmax, batch.loss_mask)
        arrays = [values[0].numpy() for values in columns]
        walked = walk_rounds(judge_chains(*arrays), supervised_spans(arrays[3]))
        assert [tokens for _, tokens in walked] == [r.emitted for r in got.rounds]
        total += serving_sums(batch, chains)
        lengths |= {r.accepted for r in got.rounds}
        real += [r.emitted for r in got.rounds]
    assert len(lengths) >= 4  # rounds of many lengths, or this proves little
    assert total.walk_figures().acceptance_length == sum(real) / len(real)
    assert total.walk_figures().acceptance_length > 1.3
    assert total.on_policy == total.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_untrained_draft_with_a_small_vocabulary_loses_nothing(target, prompts, temperature):
    """And its walk is the decoding as well; at temperature 1 it at least decodes to the end."""
    draft = make_draft(target, draft_vocab=24)
    draft.set_vocabulary(torch.arange(24) * 2 + 1)
    total, rounds = evaluate_data.ServingSums.zero(STEPS), []
    for seed, prompt in enumerate(prompts[:6]):
        sampler = make_sampler(temperature, seed)
        got = decode_speculative(target, draft, LAYERS, prompt, sampler, LIMIT, STEPS, {STOP})
        assert got.stopped or len(got.tokens) == LIMIT
        document = prompt + got.tokens, [0] * len(prompt) + [1] * len(got.tokens)
        batch = batch_of(target, [document])
        total += serving_sums(batch, serving_chains(draft, batch, None, STEPS))
        rounds += [r.emitted for r in got.rounds]
        if temperature == 0:
            assert document == respond(target, prompt)
    if temperature == 0:
        assert total.walk_figures().acceptance_length == sum(rounds) / len(rounds)


def test_packing_changes_no_chain(target, prompts, trained):
    documents = [respond(target, p) for p in prompts[:5]]
    together = serving_chains(trained, packed := batch_of(target, documents), None, STEPS)
    alone = [serving_chains(trained, batch_of(target, [d]), None, STEPS) for d in documents]
    assert torch.equal(together, torch.cat(alone, dim=1))
    sums = serving_sums(packed, together)
    assert sums.spans == len(documents)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, target, trained, prompts) -> Path:
    """A target with a tokenizer, a draft and prompts, as files."""
    folder = tmp_path_factory.mktemp("eval")
    words = ["<unk>", "<user>", "<assistant>", *(f"w{i}" for i in range(3, VOCAB))]
    words[STOP] = "<end>"  # a special token is found inside words too: it must be none's beginning
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        eos_token="<end>",
        chat_template=TEMPLATE,
    )
    target.generation_config.eos_token_id = STOP
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    trained.save_pretrained(folder / "draft", torch.float32)
    rows: list[dict] = [{"prompt": " ".join(f"w{i}" for i in p[1:-1])} for p in prompts[:6]]
    rows.append({"turns": ["w9 w10", "w11"]})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text(text, encoding="utf-8")
    return folder


def config_of(folder: Path, **changes: Any) -> EvalConfig:
    options = {
        "draft": str(folder / "draft"),
        "target": str(folder / "target"),
        "prompts": str(folder / "prompts.jsonl"),
        "max_new_tokens": LIMIT,
        "device": "cpu",
    }
    return EvalConfig(**options | changes)


def test_real_decoding_end_to_end_and_back_from_its_own_responses(
    workplace, target, prompts, tmp_path, capsys
):
    """Decode, keep the responses, make a dataset of them: it predicts what decoding measured."""
    config = config_of(
        workplace, json=str(tmp_path / "out.json"), save_responses=str(tmp_path / "own.jsonl")
    )
    report = run_eval(config)
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(json.dumps(report))
    assert report["identical"] == report["responses"] == 8  # six prompts and two turns
    assert report["ties"] == 0 and report["different"] == [] and report["warnings"] == []
    assert report["acceptance_length"] == report["emitted"] / report["rounds"] > 1.1
    assert report["tokens"] == report["emitted"] + report["responses"]
    assert report["accepted"] == sum(report["accepted_per_depth"]) <= report["drafted"]
    assert report["draft_tokens"] == STEPS
    assert report["tokens_per_second"] > 0 and report["speedup"] > 0
    shown = capsys.readouterr().out
    assert f"{report['acceptance_length']:.3f}" in shown and "8/8" in shown

    rows = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert sum(sum(row["loss_mask"]) for row in rows) == report["tokens"]
    for row, prompt in zip(rows[:6], prompts[:6], strict=True):
        assert row["input_ids"][: row["loss_mask"].index(1)] == prompt
    for row in rows:
        start = row["loss_mask"].index(1)
        assert respond(target, row["input_ids"][:start]) == (row["input_ids"], row["loss_mask"])
    first, second = rows[6]["input_ids"], rows[7]["input_ids"]
    fed_back = [t for t in first if t not in (0, STOP)]  # decoded without special tokens
    assert second[: len(fed_back)] == fed_back
    documents = [(row["input_ids"], row["loss_mask"], [("user", 0, 1)]) for row in rows]
    tiny_dataset(tmp_path / "data", layers=(0, 1, 2), model=target, documents=documents)
    simulated = run_eval(EvalConfig(draft=config.draft, data=str(tmp_path / "data"), device="cpu"))
    assert simulated["data"]["on_policy"] == 1.0
    # stored states are bfloat16, which may flip a draft here and there
    assert simulated["acceptance_length"] == pytest.approx(report["acceptance_length"], abs=0.1)
    assert "predicts real greedy decoding" in capsys.readouterr().out


def test_sampling_reports_no_identity_and_repeats_itself(workplace):
    runs = [
        run_eval(config_of(workplace, temperature=1.0, seed=seed, limit=2)) for seed in (1, 1, 2)
    ]
    assert runs[0]["identical"] is runs[0]["ties"] is runs[0]["different"] is None
    assert runs[0]["accepted_per_depth"] == runs[1]["accepted_per_depth"]
    assert runs[0]["tokens"], runs[0]["rounds"] != (runs[2]["tokens"], runs[2]["rounds"])


def test_a_wrong_token_fails_the_run_after_its_figures_are_written(
    workplace, tmp_path, monkeypatch
):
    honest = evaluate_target.decode_speculative

    def liar(*arguments: Any, **options: Any):
        generation = honest(*arguments, **options)
        generation.tokens[3] = (generation.tokens[3] + 1) % VOCAB
        return generation

    monkeypatch.setattr(evaluate_target, "decode_speculative", liar)
    config = config_of(workplace, json=str(tmp_path / "out.json"), limit=3)
    with pytest.raises(RunError, match=r"3 of 3 responses(.|\n)*jsonl:1: token 3 is") as caught:
        run_eval(config)
    assert caught.value.exit_code == 1
    assert len(json.loads((tmp_path / "out.json").read_text())["different"]) == 3


def test_prompts_that_fill_the_context_are_counted(workplace, tmp_path):
    rows = [{"prompt": "w9 " * 600}, {"prompt": "w9 w10"}, {"prompt": "w9 " * 505}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8")
    report = run_eval(config_of(workplace, prompts=str(tmp_path / "p.jsonl")))
    assert report["too_long"] == [f"{tmp_path / 'p.jsonl'}:1"]
    assert report["responses"] == report["identical"] == 2


def test_nothing_measured_is_an_error_or_null_and_never_a_length_of_one(
    workplace, target, tmp_path, capsys
):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "w9 " * 600}) + "\n")
    config = config_of(
        workplace, prompts=str(tmp_path / "p.jsonl"), json=str(tmp_path / "none.json")
    )
    with pytest.raises(RunError, match="none of 1 prompts leaves room for an answer"):
        run_eval(config)
    written = json.loads((tmp_path / "none.json").read_text())
    assert (written["acceptance_length"], written["responses"]) == (None, 0)

    capsys.readouterr()
    report = run_eval(config_of(workplace, max_new_tokens=1, limit=2))
    assert (report["responses"], report["rounds"], report["acceptance_length"]) == (2, 0, None)
    (warning,) = report["warnings"]
    assert "no draft was verified" in warning
    (line,) = [row for row in capsys.readouterr().out.splitlines() if "acceptance length" in row]
    assert line.split()[2] == "-"

    documents = [([9, 10, 11, 12], [0, 0, 0, 1], [("user", 0, 3), ("assistant", 3, 4)])] * 2
    data = tiny_dataset(tmp_path / "short", layers=(0, 1, 2), model=target, documents=documents)
    report = run_eval(EvalConfig(draft=config.draft, data=str(data), device="cpu"))
    assert report["acceptance_length"] is report["data"]["walk"]["acceptance_length"] is None
    assert report["data"]["slots"]["acceptance_length"] is None
    assert report["data"]["teacher_forced"]["acceptance_length"] is None
    (warning,) = report["warnings"]
    assert "no round in the dataset" in warning


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
        ("shallow", "layer id 2, the last of the target's 3 blocks"),
    ):
        with pytest.raises(DraftError, match=said):
            run_eval(config_of(workplace, target=str(tmp_path / name)))
    report = run_eval(config_of(workplace, target=str(tmp_path / "other"), limit=1))
    (warning,) = report["warnings"]
    assert "embedding differs from the target's" in warning
    with pytest.raises(MissingError, match=r"--target .*nowhere"):
        run_eval(config_of(workplace, target=str(tmp_path / "nowhere")))


def test_prompts_rendered_unlike_the_training_data_are_warned_about(workplace, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(workplace / "target")
    run = {"data": str(tmp_path), "chat_template_kwargs": {"enable_thinking": False}}
    same = {"enable_thinking": False}
    trained = trained_rendering({}, run)
    assert evaluate_target.check_tokenizer(tokenizer, same, trained) == []  # no tokenizer there
    tokenizer.save_pretrained(tmp_path / "target")
    assert evaluate_target.check_tokenizer(tokenizer, same, trained) == []
    (warning,) = evaluate_target.check_tokenizer(tokenizer, {}, trained)
    assert "--chat-template-kwargs {}; the training data has {'enable_thinking': False}" in warning
    tokenizer.chat_template = "Once upon a time " + TEMPLATE
    tokenizer.add_tokens(["brand-new"])
    first, second = evaluate_target.check_tokenizer(tokenizer, same, trained)
    assert "vocabulary is not that" in first and "chat template is not that" in second
    assert evaluate_target.check_tokenizer(tokenizer, {}, trained_rendering({}, None)) == []


@pytest.fixture(scope="module")
def data(tmp_path_factory, target) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tiny"
    return tiny_dataset(folder, n_docs=20, layers=(0, 1, 2), model=target)


def test_pack_size_changes_no_figure_and_teacher_forcing_is_the_drafts_own(
    workplace, data, target, trained, monkeypatch
):
    config = EvalConfig(draft=str(workplace / "draft"), data=str(data), device="cpu")
    whole = run_eval(config)["data"]
    monkeypatch.setattr(evaluate_data, "_PACK_TOKENS", 1)
    single = run_eval(config)["data"]
    for name in ("walk", "slots"):
        assert whole[name] == single[name]
    assert whole["teacher_forced"] == pytest.approx(single["teacher_forced"], rel=1e-5)
    assert whole["documents"] == 20 and whole["split"] == "all"
    assert 0 <= whole["on_policy"] < 0.5  # random documents are nobody's own words
    dataset = HiddenStatesDataset(data)
    batch = evaluate_data.read_pack(dataset, range(20), trained.columns(), torch.float32)
    sums = trained.loss(batch, head_of(target), trained.slot_counts(batch)).sums
    assert whole["teacher_forced"] == pytest.approx(trained.summarise(sums), rel=1e-4)


def test_both_modes_at_once(workplace, data):
    report = run_eval(config_of(workplace, data=str(data), limit=2))
    assert report["data"]["documents"] == 2
    assert report["acceptance_length"] == report["emitted"] / report["rounds"]


def test_a_run_says_which_documents_were_held_out(workplace, data, tmp_path):
    dataset = HiddenStatesDataset(data)
    known = dict(dataset=dataset.manifest.fingerprint, seed=0, validation=0.3, seq_len=2048)
    known["split_rule"] = SPLIT_RULE
    held_out, name = choose_documents(dataset, "auto", known)
    train, _ = choose_documents(dataset, "train", known)
    everything, _ = choose_documents(dataset, "all", known)
    assert name == "validation" and 0 < len(held_out) < len(everything)
    assert sorted(held_out + train) == everything
    assert choose_documents(dataset, "auto", known | {"dataset": "another"})[1] == "all"
    assert choose_documents(dataset, "validation", known | {"dataset": "x"})[0] == held_out
    assert choose_documents(dataset, "auto", None)[1] == "all"
    with pytest.raises(ConfigError, match="--split train: only a run directory"):
        choose_documents(dataset, "train", None)

    run = tmp_path / "run"
    run.mkdir()
    (run / "best").symlink_to(workplace / "draft", target_is_directory=True)
    options = {"data": str(data), "seed": 0, "validation": 0.3, "seq_len": 2048}
    (run / "fit.json").write_text(json.dumps(options))
    identity = {"dataset": known["dataset"], "split_rule": SPLIT_RULE}
    (run / "run.json").write_text(json.dumps({"identity": identity}))
    for draft in (run, run / "best"):
        report = run_eval(EvalConfig(draft=str(draft), data=str(data), device="cpu"))
        assert report["data"]["split"] == "validation"
        assert report["data"]["documents"] == len(held_out)
    (run / "run.json").write_text(json.dumps({"identity": {"dataset": known["dataset"]}}))
    with pytest.raises(ConfigError, match=f"by rule None, this release by '{SPLIT_RULE}'"):
        run_eval(EvalConfig(draft=str(run), data=str(data), device="cpu"))
    (run / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        run_eval(EvalConfig(draft=str(run), data=str(data), device="cpu"))


def test_a_dataset_of_another_target_or_without_a_layer_is_refused(workplace, tmp_path):
    tiny_dataset(tmp_path / "wide", n_docs=2, vocab=80)
    tiny_dataset(tmp_path / "few", n_docs=2, vocab=VOCAB, layers=(0, 1))
    other = tiny_llama(VOCAB, seed=9)
    tiny_dataset(tmp_path / "other", n_docs=2, layers=(0, 1, 2), model=other)
    for name, said in (
        ("other", r"--draft: a draft of another target than that of .*other \(100"),
        ("wide", "target of vocabulary 64, .*wide has 80"),
        ("few", r"layers \[0, 2\]; .*few holds \[0, 1\], without \[2\]"),
    ):
        config = EvalConfig(draft=str(workplace / "draft"), data=str(tmp_path / name), device="cpu")
        with pytest.raises(DraftError, match=said):
            run_eval(config)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "nothing to evaluate on"),
        ({"target": "t"}, "--target needs --prompts"),
        ({"prompts": "p", "data": "d"}, "--prompts needs --target"),
        ({"data": "d", "save_responses": "f"}, "--save-responses writes greedy"),
        (
            {"target": "t", "prompts": "p", "save_responses": "f", "temperature": 1.0},
            "--save-responses writes greedy",
        ),
        ({"data": "d", "temperature": -1.0}, "--temperature -1.0"),
        ({"data": "d", "temperature": 1e-320}, "--temperature 1e-320: .* at least 1e-06"),
        ({"data": "d", "temperature": float("nan")}, "--temperature nan"),
        ({"data": "d", "max_new_tokens": 0}, "--max-new-tokens 0"),
    ],
)
def test_options_that_contradict_each_other(options, said):
    with pytest.raises(ConfigError, match=said):
        EvalConfig(draft="x", **options)


def test_an_output_that_cannot_be_written_is_said_before_the_work(tmp_path):
    with pytest.raises(ConfigError, match=r"--json .*: not a file in an existing directory"):
        run_eval(EvalConfig(draft="none", data="none", json=str(tmp_path / "no" / "out.json")))
