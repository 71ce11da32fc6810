"""A target in a process elsewhere trains a draft as one beside the trainer does, bit for bit."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spec_data import RemoteTarget, Target, TargetServer
from spec_data.shards.batch import MASS, PROBABILITIES
from spec_data.shards.errors import ConfigError, RunError, TargetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.losses.head import TargetHead
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.forked import Forked
from tests.spec_data.exchange.wire import answering, head_of, page, request, told
from tests.spec_train.drafts.any_draft import build_draft
from tests.tolerance import close, network

LAYERS, ROWS = (0, 1, 2), [[0, 1], [2], [3, 4]]
VOCABULARY = torch.arange(1, 64, 3)  # int64 [Vd]


@pytest.fixture(scope="module")
def server():
    with TargetServer(Target(tiny_llama(), LAYERS), port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def batch() -> tuple:
    """Ids, attention mask, loss mask and lengths of packed documents."""
    documents = random_documents(5, 64, 0)
    ids, attention, mask = (torch.zeros(len(ROWS), 64, dtype=torch.int64) for _ in range(3))
    for b, row in enumerate(ROWS):
        start = 0
        for tokens, supervised, _ in (documents[d] for d in row):
            part = slice(start, start + len(tokens))
            ids[b, part], mask[b, part] = torch.tensor(tokens), torch.tensor(supervised)
            attention[b, part], start = 1, part.stop
    return ids, attention, mask, [[len(documents[d][0]) for d in row] for row in ROWS]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return HiddenStatesDataset(tiny_dataset(tmp_path_factory.mktemp("data") / "set", n_docs=2))


def given(supervision: str) -> dict:
    probs = supervision == "target-probs"
    return {"supervision": supervision, "draft_vocabulary": VOCABULARY if probs else None}


def test_a_notebook_shows_what_they_are(server):
    target = "Target(LlamaForCausalLM, layers (0, 1, 2), torch.float32, cpu)"
    assert repr(server) == f"TargetServer({server.url}, {target})"
    assert repr(RemoteTarget(server.url, LAYERS)) == f"RemoteTarget({server.url}, layers {LAYERS})"


@pytest.mark.parametrize("supervision", ["final-hidden", "logits", "target-probs"])
def test_loss_and_gradients_are_those_of_a_target_beside(server, batch, dataset, supervision):
    head = TargetHead.from_dataset(dataset.path, torch.float32, "cpu")
    draft = build_draft("eagle3", dataset, head).eval()
    own = given(supervision)
    if supervision == "target-probs":
        own["draft_vocabulary"] = draft.draft_ids
    remote = RemoteTarget(server.url, LAYERS, **own).generate_batch(*batch)
    beside = Target(tiny_llama(), LAYERS, **own).generate_batch(*batch)
    results = []
    for made in (remote, beside):
        loss = draft.loss(made, head if supervision == "final-hidden" else None).loss
        draft.zero_grad()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in draft.parameters() if p.requires_grad)])
    assert float(results[0][0]) > 0.1 and any(bool(x.any()) for x in results[0][1:])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    found, wanted = (made.plain() | made.hidden for made in (remote, beside))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_probabilities_and_choices_are_those_of_the_model_alone(batch, dtype):
    """In another process; every document computed by transformers without the others."""
    model = tiny_llama().to(dtype)
    with TargetServer(Target(model, LAYERS), port=0) as server:
        elsewhere = Forked(lambda: server.serve_forever() or 0)
        try:
            found = RemoteTarget(server.url, LAYERS, **given("target-probs")).generate_batch(*batch)
        finally:
            elsewhere.kill()
    inside = set(VOCABULARY.tolist())
    for b, lengths in enumerate(batch[3]):
        start = 0
        for length in lengths:
            tokens = batch[0][b, start : start + length]
            with torch.no_grad():
                logits = model.double()(tokens[None]).logits[0]  # [T, V]
            for t in range(length):
                exps = [float(x) for x in (logits[t] - logits[t].max()).exp()]
                total = sum(exps[v] for v in inside)
                slot, reference = start + t, [exps[v] / total for v in VOCABULARY.tolist()]
                close(
                    found.hidden[PROBABILITIES][b, slot], torch.tensor(reference).float(),
                    terms=network(4), dtype=torch.float32,
                )  # fmt: skip
                close(
                    found.hidden[MASS][b, slot].float(), torch.tensor(total / sum(exps)).float(),
                    terms=network(4), dtype=torch.float32,
                )  # fmt: skip
                assert int(found.target_argmax[b, slot]) == exps.index(max(exps))
            start += length
        assert not found.hidden[PROBABILITIES][b, start:].any()


def test_trainers_of_several_vocabularies_share_a_server(server, batch):
    """No request sees the vocabulary of another one."""
    vocabularies = [torch.arange(first, 64, 5) for first in range(4)]
    remotes = [
        RemoteTarget(server.url, LAYERS, supervision="target-probs", draft_vocabulary=ids)
        for ids in vocabularies
    ]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: remotes[n % 4].generate_batch(*batch), range(16)))
    for number, made in enumerate(found):
        own = {"supervision": "target-probs", "draft_vocabulary": vocabularies[number % 4]}
        beside = Target(server.target.model, LAYERS, **own).generate_batch(*batch)
        assert torch.equal(made.hidden[PROBABILITIES], beside.hidden[PROBABILITIES])


def test_what_goes_wrong_is_named(server, batch):
    with pytest.raises(ConfigError, match=r"hands over layers \(0, 1, 2\), and .* \(0, 1, 3\)"):
        RemoteTarget(server.url, (0, 1, 3))
    with pytest.raises(TargetError, match="target-probs goes with draft_vocabulary"):
        RemoteTarget(server.url, LAYERS, supervision="target-probs").generate_batch(*batch)
    with pytest.raises(TargetError, match="supervision 'all': final-hidden, logits, target-probs"):
        RemoteTarget(server.url, LAYERS, supervision="all").generate_batch(*batch)
    remote = RemoteTarget(server.url, LAYERS)
    with pytest.raises(TargetError, match=r"seq_lens add up to \[1, 1, 1\], the attention mask"):
        remote.generate_batch(*batch[:3], seq_lens=[[1], [1], [1]])
    with pytest.raises(TargetError, match=r"input_ids: \d+ in row 0, slot 0 is no id of this"):
        remote.generate_batch(batch[0] + 1000, *batch[1:])
    for body in (b"[0, 1, 2]", b"<html>", b"[" * 2000, b"{}"):
        with (
            answering(lambda _, body=body: iter([page(body)])) as url,
            pytest.raises(RunError, match="is no TargetServer"),
        ):
            RemoteTarget(url, LAYERS)
    with (
        answering(
            lambda _: iter([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[0, 1, 2]"])
        ) as url,
        pytest.raises(ConfigError, match=r"an older release, or another server.*the same release"),
    ):
        RemoteTarget(url, LAYERS)
    remote.url = remote.url.rpartition(":")[0] + ":1"
    with pytest.raises(RunError, match=":1: no target answers there"):
        remote.generate_batch(*batch)


def test_without_the_access_token_one_is_told_what_to_do(server, monkeypatch):
    monkeypatch.setenv("SPEC_SERVER_TOKEN", "x" * 40)
    with pytest.raises(ConfigError, match=r"wants its access token.*HOST-\d+.*SPEC_SERVER_TOKEN"):
        RemoteTarget(server.url, LAYERS)
    assert RemoteTarget(server.url, LAYERS, token=server.token).layers == LAYERS


def test_a_batch_is_no_larger_than_the_server_takes(batch):
    with TargetServer(Target(tiny_llama(), LAYERS), port=0, max_tokens=100) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with pytest.raises(TargetError, match=r"3 x 64 tokens; http.* takes 100 at most"):
            RemoteTarget(server.url, LAYERS).generate_batch(*batch)
        head = head_of({"input_ids": ("I64", [3, 64])})
        assert told(server.port, post(server, head + bytes(8 * 192)))[0] == 400
        large = request(server, "/batch/logits", "POST", b"", Content_Length="100000")
        assert told(server.port, large)[0] == 413
        server.shutdown()
        thread.join()


def post(server, body, supervision="final-hidden"):
    return request(server, f"/batch/{supervision}", "POST", body)


GOOD = {
    "input_ids": ("I64", [2, 3]), "attention_mask": ("BOOL", [2, 3]), "loss_mask": ("BOOL", [2, 3]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_mask": ("BOOL", [3, 2])}, "loss_mask is bool [3, 2], and input_ids int64 [2, 3]"),
        ({"attention_mask": ("BOOL", [1, 3])}, "attention_mask is bool [1, 3]"),
        ({"input_ids": ("F32", [2, 3])}, "input_ids is float32 [2, 3], expected 2 axes"),
        ({"input_ids": ("I64", [6])}, "input_ids is int64 [6], expected 2 axes"),
        ({"loss_mask": None}, "this one has input_ids, attention_mask"),
        ({"other": ("F32", [1])}, "other"),
        ({"seq_lens": ("I64", [3, 1])}, "seq_lens is int64 [3, 1] for 2 rows"),
        ({"seq_lens": ("I64", [2, 4])}, "seq_lens is int64 [2, 4] for 2 rows of 3"),
        ({"draft_vocabulary": ("I64", [3, 1])}, "draft_vocabulary is int64 [3, 1]"),
        ({"draft_vocabulary": ("I64", [4])}, "target-probs goes with draft_vocabulary"),
        ({name: (dtype, [0, 3]) for name, (dtype, _) in GOOD.items()}, "0 x 3 tokens"),
    ],
)
def test_a_wrong_request_gets_400_and_words(server, changes, words):
    tensors = {name: given for name, given in (GOOD | changes).items() if given}
    size = sum(
        {"BOOL": 1, "I64": 8, "F32": 4}[d] * torch.Size(s).numel() for d, s in tensors.values()
    )
    status, text = told(server.port, post(server, head_of(tensors) + bytes(size)))
    assert status == 400 and words in text.decode()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([-1, 3, 5], "-1 is no id of this target"),
        ([3, 3, 5], "each once, and 3 comes after 3"),
        ([5, 3], "each once, and 3 comes after 5"),
        ([3, 64], "64 is no id of this target, whose head has 64"),
        ([], r"expected token ids \[Vd\]"),
        ([0.5], r"expected token ids \[Vd\], not torch.float32 \[1\]"),
        ([[1, 2]], r"expected token ids \[Vd\], not torch.int64 \[1, 2\]"),
        ([True], r"expected token ids \[Vd\], not torch.bool"),
    ],
)
def test_a_draft_vocabulary_is_ids_of_the_target(server, batch, ids, words):
    given = {"supervision": "target-probs", "draft_vocabulary": torch.tensor(ids)}
    with pytest.raises(TargetError, match=words):
        Target(server.target.model, LAYERS, **given)
    if given["draft_vocabulary"].dtype == torch.int64:
        with pytest.raises(TargetError, match="draft_vocabulary"):
            RemoteTarget(server.url, LAYERS, **given).generate_batch(*batch)


@pytest.mark.parametrize("token", [-1, 64, -100])
def test_ids_that_the_target_lacks_are_refused_here_and_there(server, batch, token):
    """In padding too, where they end the process of a GPU."""
    ids = batch[0].clone()
    ids[1, -1] = token
    for target in (server.target, RemoteTarget(server.url, LAYERS)):
        if isinstance(target, Target):
            target.supervise("final-hidden")
        with pytest.raises(TargetError, match=f"input_ids: {token} in row 1, slot 63 is no id"):
            target.generate_batch(ids, *batch[1:])


def test_lengths_below_zero_are_refused(batch):
    with pytest.raises(TargetError, match="expected lengths per row"):
        lengths = [[*row, -5] for row in batch[3]]
        Target(tiny_llama(), LAYERS).generate_batch(*batch[:3], lengths)


def test_states_of_another_dtype_than_before_are_refused(server, batch):
    """A residual stream may be float32 where weights are bfloat16: the first batch decides."""
    remote = RemoteTarget(server.url, LAYERS)
    remote.generate_batch(*batch)
    remote._dtypes["hidden.L1"] = torch.bfloat16
    with pytest.raises(RunError, match=r"hidden.L1 is float32 .*, and bfloat16 .* was asked for"):
        remote.generate_batch(*batch)
