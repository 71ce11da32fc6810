"""--context-parallel: two and four processes of gloo, against each document alone in one."""

import socket
import time
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from weakref import WeakSet, finalize

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from spec_data.capture import attention_in_parts as parts
from spec_data.capture import processes
from spec_data.capture.context_parallel import SplitTarget, check_family, forward_bytes
from spec_data.capture.processes import leading
from spec_data.models.loading import load_model
from spec_data.models.target_options import Spread
from spec_data.shards.errors import ConfigError, RunError, TargetError
from spec_data.shards.packing import row_layout
from spec_data.shards.reader import open_dataset
from spec_data.terminal.progress import size
from spec_data.verification.run import examine
from tests import forked
from tests.current_families import COMMON, CURRENT, NESTED
from tests.families import FAMILIES, LAYERS, LEAKY, MORE_FAMILIES, VOCAB, tiny_model
from tests.forked import Forked, fork_program
from tests.spec_data.runs import (
    PAUSED,
    digests,
    estimate_with,
    flags,
    fork_cli,
    generate_with,
    options,
    save_target,
    write_corpus,
)
from tests.tolerance import close, network

one_thread = forked.one_thread
CHOSEN = (-1, 0, 2)
SHOWN = ("llama", "qwen3", "gemma2", "gemma3", "mistral-sliding", "gpt_oss", "deepseek_v3", "gpt2")
LENGTHS = [[30, 11, 5], [3, 26]]  # of documents, per row; both end in padding


def launched(count: int, start: Callable[[], Forked]) -> list[Forked]:
    """Start processes as torchrun does: one more of `start` for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with pytest.MonkeyPatch.context() as patch:
        where = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in where.items():
            patch.setenv(name, value)
        begun = []
        for rank in map(str, range(count)):
            patch.setenv("RANK", rank)
            patch.setenv("LOCAL_RANK", rank)
            begun.append(start())
        return begun


def together(count: int, work: Callable[[], object]) -> None:
    """Run `work` in processes of one gloo group; each must end well."""

    def member() -> int:
        dist.init_process_group("gloo")
        work()
        dist.destroy_process_group()
        return 0

    for process in launched(count, lambda: Forked(member)):
        output, error = process.communicate()
        assert process.returncode == 0, output + error


def generated(out: Path, given: dict, held: int = 1 << 30) -> list[Forked]:
    """Start generate in two processes; the first one waits before unit `held` for a file OUT.go."""
    given = {k: v for k, v in given.items() if k != "device"}
    words = flags(given | {"out": str(out), "context_parallel": 2})
    program = PAUSED.replace("unit >= held", f"unit >= held and not os.path.exists('{out}.go')")
    return launched(2, lambda: fork_program(program, str(held), "generate", *words))


def ended(begun: list[Forked]) -> list[int]:
    return [process.wait() for process in begun]


def packed(lengths: list[list[int]] = LENGTHS) -> tuple[torch.Tensor, ...]:
    """Ids, document ids and position ids of rows with padding, int64 [B, T]."""
    length = max(map(sum, lengths)) + 1
    documents, positions = row_layout(lengths, length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (len(lengths), length), generator=generator)
    return ids.masked_fill(documents < 0, 0), documents, positions


def compare(family: str, lengths: list[list[int]] = LENGTHS) -> None:
    """In each process: the first one compares states and logits with those of documents alone."""
    model = tiny_model(family)
    rows = packed(lengths)
    states = SplitTarget(model, CHOSEN).forward_together(*rows, "per-document", True)
    if dist.get_rank() > 0:
        return
    ids, documents, _ = rows
    for row, number in {(b, int(n)) for b, of in enumerate(documents) for n in of if n >= 0}:
        at = documents[row] == number
        alone = model(ids[row, at][None], output_hidden_states=True, use_cache=False)
        expected = {k: alone.hidden_states[k + 1][0] for k in CHOSEN}
        actual = {k: states.layers[k][row, at] for k in CHOSEN}
        for k in CHOSEN:
            close(actual[k], expected[k], terms=network(k + 1) + 1, name=f"{family} {k}")
        final = states.final[row, at], alone.hidden_states[-1][0]
        close(*final, terms=network(LAYERS), name=f"{family} final")
        logits = states.logits[row, at], alone.logits[0]
        close(*logits, terms=network(LAYERS + 1), name=f"{family} logits")


@pytest.mark.parametrize(
    ("count", "families"), [(2, SHOWN), (4, ("llama", "gemma3", "gpt_oss", "deepseek_v3"))]
)
def test_states_are_those_of_each_document_alone(count, families):
    together(count, lambda: [compare(family) for family in families])


def test_a_process_may_have_padding_alone():
    """Rows that are shorter than the pieces of four processes."""
    together(4, lambda: [compare("gemma3", lengths) for lengths in ([[1]], [[2]], [[1, 1], [3]])])


@pytest.mark.long
def test_every_family_is_split_or_refused_by_name():
    def every() -> None:
        for family in (*FAMILIES, *MORE_FAMILIES, *LEAKY, *CURRENT, *NESTED):
            config = tiny_model(family).config
            try:
                check_family(config)
            except TargetError as error:
                assert config.model_type in str(error)
                continue
            compare(family)

    together(2, every)


def test_a_share_has_as_many_keys_to_attend_to_as_any_other():
    rows = torch.arange(48).view(2, 24)
    shares = [parts.Share(rank=r, processes=4, length=24) for r in range(4)]
    assert torch.equal(parts.Share.joined([s.of(rows) for s in shares], 1), rows)
    keys = [sum(q + 1 for _, a, b in s.pieces for q in range(a, b)) for s in shares]
    assert len(set(keys)) == 1
    for share in shares:
        local = share.of(rows)[0]
        assert all(local[here] == start for here, start, _ in share.pieces)


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("reach", [None, 5])
def test_parts_cover_each_pair_of_query_and_key_once(reach, always, monkeypatch):
    """Of all shares together, against a plain loop over queries and keys of a document."""
    monkeypatch.setattr(parts, "_SHARE_QUERIES", 3)
    spans, length = [[(0, 17), (17, 30)], [(2, 11)]], 32
    expected = {
        (row, q, k)
        for row, of_row in enumerate(spans)
        for a, b in of_row
        for q in range(a, b)
        for k in range(a, q + 1)
        if reach is None or q - k < reach
    }
    pairs = []
    for rank in range(2):
        share = parts.Share(rank=rank, processes=2, length=length)
        rule = parts.causal_mask_function
        if reach is not None:
            rule = parts.sliding_window_causal_mask_function(reach)
        given = {"rule": rule, "reach": reach, "spans": spans, "always": always, "share": share}
        mask = parts.RuleMask(**given)
        slots = share.of(torch.arange(length)[None])[0]
        for row, start, stop, first, here in mask.parts(length, 4):
            assert slots[here : here + stop - start].tolist() == list(range(start, stop))
            seen = mask.of(row, start, stop, first, torch.device("cpu"))
            if seen is None:  # plain causal attention
                seen = torch.ones(stop - start, stop - first, dtype=torch.bool).tril()
                assert start == first
            pairs += [(row, start + q, first + k) for q, k in seen.view(stop - start, -1).nonzero()]
    pairs = [(row, int(q), int(k)) for row, q, k in pairs]
    assert len(pairs) == len(set(pairs)) and set(pairs) == expected


# -- memory ----------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The most bytes at one time of the tensors that operations inside have made."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most, self.counted = 0, 0, WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count each new storage until it is freed."""
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage not in self.counted:
                self.counted.add(storage)
                self.add(storage.nbytes())
                finalize(storage, self.add, -storage.nbytes())
        return made

    def add(self, count: int) -> None:
        self.live += count
        self.most = max(self.most, self.live)


def measure(tokens: int, kind: str, own: dict) -> None:
    """In each process: what a forward takes is about what is told, in the first one at most."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**COMMON | own))
    model.requires_grad_(False)
    ids, layout = packed([[tokens]])[0][:, :tokens], packed([[tokens]])[1:]
    target = SplitTarget(model, CHOSEN)
    with LiveBytes() as used:
        target.forward_together(ids, *(x[:, :tokens] for x in layout), None, False)
    told = forward_bytes(model.config, tokens, dist.get_world_size(), len(CHOSEN) + 1, 4)
    if dist.get_rank() == 0:
        assert 0.7 * told < used.most < 1.4 * told, (used.most, told)
    else:
        assert used.most < 1.25 * told, (used.most, told)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 4])
def test_the_memory_of_a_process_is_about_what_is_told(count, monkeypatch):
    """Long documents: of many key heads, of few, and of a wide MLP."""
    monkeypatch.setattr(parts, "_SHARE_QUERIES", 32)  # masks are small beside the rest, as on a GPU
    many, few, wide = {"num_key_value_heads": 4}, {"head_dim": 32}, {"intermediate_size": 512}
    together(count, lambda: [measure(3072, "llama", own) for own in (many, few, wide)])


def test_where_layers_differ_the_largest_counts():
    config = tiny_model("gemma4").config
    names = "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"
    alike = {name: getattr(config, name) for name in names}
    layers = (config.per_layer_config[i] for i in range(config.num_hidden_layers))
    sizes = {layer.head_dim for layer in layers}
    given = 64, 2, 3, 4
    told = [forward_bytes(Namespace(**alike, head_dim=size), *given) for size in sorted(sizes)]
    assert told[0] < told[1] == forward_bytes(config, *given)
    wide = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    listed, one = ({**wide, "intermediate_size": size} for size in ([512, 4096], 4096))
    assert forward_bytes(Namespace(**listed), *given) == forward_bytes(Namespace(**one), *given)


def test_an_estimate_tells_the_memory_of_each_process(source):
    given = {k: v for k, v in source.items() if k != "device"}
    model = load_model(source["target"], device="cpu")
    weights = 4 * sum(p.numel() for p in model.parameters())
    told = estimate_with(**given | {"context_parallel": 4})
    assert told.process_bytes == weights + forward_bytes(model.config, 512, 4, 4, 4)
    assert f"weights {size(weights)}" in told.text and "memory, each process" in str(told)
    alone = estimate_with(**given)
    assert alone.process_bytes is None and "each process" not in alone.text + str(alone)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}], ids=str)
def test_an_error_of_one_process_alone_ends_all_and_one_of_all_is_handed_on(failing):
    """Planted: a block that raises what a family raises where it cannot be split."""

    def member() -> int:
        processes._FAILING = timedelta(seconds=1)
        commands = processes._commands = processes._Commands()
        target, rank, rows = SplitTarget(tiny_model("llama"), CHOSEN), dist.get_rank(), packed()

        def forward() -> None:
            if rank > 0:
                commands.receive()
            target.forward(*rows, "per-document")

        forward()
        if rank in failing:
            target.model.model.layers[1].forward = lambda *_, **__: [][rank]
        alone = rf"failed in process {rank}, and not in all of them \(IndexError"
        words = alone if rank in failing else "another process of .* has ended"
        kind, words = (IndexError, "range") if len(failing) == 2 else (RunError, words)
        with pytest.raises(kind, match=words):
            forward()
        if len(failing) == 2:  # the next one may be another attempt
            del target.model.model.layers[1].forward
            forward()
        return 0

    both = launched(2, lambda: Forked(member))
    said = [process.communicate() for process in both]
    assert ended(both) == [0, 0], said


# -- what the proof before the first shard sees ----------------------------------------------------


def prove(family: str, breaks: Callable[[SplitTarget, pytest.MonkeyPatch], None]) -> None:
    """In each process, which all forward what the proof asks for: it must say no."""
    target = SplitTarget(tiny_model(family), CHOSEN)
    document = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch:
        breaks(target, patch)
        if dist.get_rank() == 0:
            with pytest.raises(TargetError, match=r"tokens of \w+ cannot be split .* differ by"):
                target.prove([document], 64)
        else:
            layout = torch.zeros_like(document)[None], torch.arange(60)[None]
            target.forward(document[None], *layout, None)


def lose_windows(_target: SplitTarget, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        parts, "sliding_window_causal_mask_function", lambda _: parts.causal_mask_function
    )


def mix_neighbours(target: SplitTarget, _patch: pytest.MonkeyPatch) -> None:
    """An MLP that reads the token before, as a short convolution does."""
    mlp = target.model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) + 0.1 * x.roll(1, 1)


@pytest.mark.parametrize(
    ("family", "breaks"), [("gemma3", lose_windows), ("llama", mix_neighbours)]
)
def test_the_proof_sees_what_is_lost_between_processes(family, breaks):
    together(2, lambda: prove(family, breaks))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "mamba: it has layers of linear_attention"),
        ("qwen3_next", "qwen3_next: it has layers of linear_attention"),
        ("llama4", "llama4_text: it has layers of chunked_attention"),
        ("lfm2", "lfm2: it has layers of conv"),
        ("glm_moe_dsa", "glm_moe_dsa: it has layers of indexed_attention"),
        ("minimax_m3", "minimax_m3_vl_text: it chooses the keys"),
        ("falcon", "falcon: its attention is not a function"),
        ("llama-dynamic", "llama: its rotary frequencies follow the longest row"),
    ],
)
def test_families_are_refused_by_name(family, reason):
    with pytest.raises(TargetError, match=f"cannot split the tokens of {reason}"):
        check_family(tiny_model(family).config)


def test_frequencies_of_one_type_of_layers_that_follow_the_row_are_refused():
    config = tiny_model("gemma3").config
    check_family(config)
    config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    with pytest.raises(TargetError, match="its rotary frequencies follow the longest row"):
        check_family(config)


def test_a_family_is_refused_before_the_corpus_is_read(tmp_path):
    target = save_target(tmp_path / "target", "mamba")
    (tmp_path / "chats.jsonl").write_text("no rows")
    given = options(target, tmp_path / "chats.jsonl", tmp_path / "out", context_parallel=2)
    with pytest.raises(TargetError, match="cannot split the tokens of mamba"):
        estimate_with(**given | {"device": "auto"})


def test_other_numbers_of_processes_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for started in ("1", "3"):
        monkeypatch.setenv("WORLD_SIZE", started)
        with (
            pytest.raises(ConfigError, match=r"needs 2 processes.*torchrun --nproc-per-node 2"),
            leading(Spread(context_parallel=2)),
        ):
            raise AssertionError("the command must not run")


def test_masks_of_packs_and_other_kernels_are_refused(tmp_path):
    target = SplitTarget(tiny_model("llama"), CHOSEN)
    with pytest.raises(ConfigError, match="has no mask of a pack"):
        target.prove([torch.arange(3, 9)], 64, "block-causal")


# -- generate --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> dict:
    """Options of generate: windows, documents longer than a window, four shards and more."""
    folder = tmp_path_factory.mktemp("source")
    target = save_target(folder / "target", "gemma3")
    corpus = write_corpus(folder / "chats.jsonl", 30)
    return options(target, corpus, folder / "alone", max_shard_size="60KB")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "data"
    assert ended(generated(out, source)) == [0, 0]
    return out


def test_shards_are_those_of_one_process(source, whole):
    generate_with(**source)
    alone, both = open_dataset(source["out"]), open_dataset(whole)
    assert list(alone.doc_ids) == list(both.doc_ids)
    for row, other in zip(alone, both, strict=True):
        assert torch.equal(row["input_ids"], other["input_ids"])
        for name in ("hidden.L0", "hidden.L2", "hidden.L4", "hidden.final"):
            terms = network(LAYERS)
            close(other[name].float(), row[name].float(), terms=terms, stored=torch.bfloat16)
    assert both.manifest.packing.form == alone.manifest.packing.form == "per-document"
    assert both.manifest.captured_with["device"] == "cpu, split over 2 processes"
    assert not examine(data=str(whole), target=source["target"], samples=4).failures


@pytest.mark.long
def test_a_killed_process_damages_no_shard(source, whole, tmp_path):
    out = tmp_path / "data"
    first, second = generated(out, source, held=2)
    until = time.monotonic() + 120
    while not (out / "shards" / "unit-00000.arrow").is_file():
        assert first.poll() is None and time.monotonic() < until, first.communicate()
        time.sleep(0.01)
    second.kill()
    second.wait()
    (tmp_path / "data.go").touch()
    _, error = first.communicate()
    assert first.returncode == 1
    assert "another process of --context-parallel has ended" in " ".join(error.split())
    finished = sorted((out / "shards").glob("*.arrow"))
    assert finished and len(finished) < len(list((whole / "shards").iterdir()))
    for shard in finished:
        assert shard.read_bytes() == (whole / "shards" / shard.name).read_bytes()
    assert ended(generated(out, source)) == [0, 0]
    assert digests(out) == digests(whole)


def test_a_run_of_one_process_goes_on_in_two(source, tmp_path):
    """The proof that it left is checked: up to eight documents are captured again."""
    given, out = source | {"out": str(tmp_path / "data")}, tmp_path / "data"
    alone = fork_cli(given, held=1)
    until = time.monotonic() + 120
    while not (out / "shards" / "unit-00000.arrow").is_file():
        assert alone.poll() is None and time.monotonic() < until, alone.communicate()
        time.sleep(0.01)
    alone.kill()
    alone.wait()
    assert ended(generated(out, source)) == [0, 0]
    assert open_dataset(out).manifest.also_captured_with
