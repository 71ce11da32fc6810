"""A target in a process elsewhere trains a draft as one beside the trainer does, bit for bit."""

import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import IncompleteRead

import pytest
import torch

from spec_data import RemoteTarget, Target, TargetServer
from spec_data.shards.batch import MASS, PROBABILITIES
from spec_data.shards.errors import ConfigError, RunError, TargetError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.losses.head import TargetHead
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.forked import Forked
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
    remote = RemoteTarget(server.url, LAYERS)
    with pytest.raises(TargetError, match=r"seq_lens add up to \[1, 1, 1\], the attention mask"):
        remote.generate_batch(*batch[:3], seq_lens=[[1], [1], [1]])
    with pytest.raises(RunError, match="IndexError: index out of range"):
        remote.generate_batch(batch[0] + 1000, *batch[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteTarget, "_ask", lambda *_: b"{}")
        with pytest.raises(RunError, match="its answer is damaged"):
            remote.generate_batch(*batch)
        patch.setattr(RemoteTarget, "_ask", lambda *_: b"<html>")
        with pytest.raises(RunError, match="is no TargetServer"):
            RemoteTarget(server.url, LAYERS)
        patch.undo()

        def cut(*_):
            raise IncompleteRead(b"abc", 997)

        patch.setattr("http.client.HTTPResponse.read", cut)
        with pytest.raises(RunError, match="IncompleteRead"):
            remote.generate_batch(*batch)
    remote.url = remote.url.rpartition(":")[0] + ":1"
    with pytest.raises(RunError, match=":1: no target answers there"):
        remote.generate_batch(*batch)
