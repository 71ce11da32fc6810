"""The verdict on a draft depends on its target: all pairs of engine and draft, for some targets."""

import pytest
import torch

import spec_train
from spec_data.models.engines import engines, served
from spec_train.formats.draft_card import draft_card, servings
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.preflight import OF_TARGET, OK, REFUSE, SPEC_TRAIN, WARN, Subject, preflight
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.write import with_facts_in, write_form
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import SHAPED, build_draft
from tests.spec_train.formats.published import tiny

dataset, head = any_draft.dataset, any_draft.head

ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen2ForCausalLM",
    "Exaone4ForCausalLM",
    "Gemma3ForCausalLM",
    "Cohere2ForCausalLM",
    "Glm4MoeForCausalLM",
    "NobodysForCausalLM",
)
SHAPES: tuple[dict[str, str], ...] = ({}, {"attention_bias": "true"}, {"mlp_bias": "true"})


@pytest.mark.parametrize("kind", SHAPED)
@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "attention", "mlp"])
def test_every_pair_of_engine_and_draft(dataset, head, kind, shape):
    """Known to lack it: refused. Unknown: warned of. And no list holds an ok beside a refusal."""
    own = build_draft(kind, dataset, head, **shape).files(torch.float32, "x")
    as_served = "dspark" if own.config.get("sample_from_anchor") else kind
    for names in [(), *((name,) for name in ARCHITECTURES)]:
        subject = Subject(own, TargetFacts(architectures=names), "vllm")
        found = preflight(subject)
        for engine, findings in found.items():
            levels = [finding.level for finding in findings]
            assert levels and not (OK in levels and {REFUSE, WARN} & {*levels}), (engine, names)
            if engine == SPEC_TRAIN or kind not in engines().engine[engine].drafts:
                continue
            known = served(engine, as_served, subject.architectures).answer
            said = [finding.level for finding in findings if finding.rule == OF_TARGET]
            assert said == {True: [], False: [REFUSE], None: [WARN]}[known], (engine, names)
        printed = servings(subject, found, "out", 3)
        refused = {f.engine for some in found.values() for f in some if f.level == REFUSE}
        assert not {serving.engine for serving in printed} & refused
        card = draft_card(subject, printed, 3, {"acceptance_length": None, "step": 1})
        assert "held-out" not in card  # too few tokens to measure a length
        doubted = "NobodysForCausalLM" in names
        assert card.count("Not certain: it is unknown whether it serves") == doubted * len(
            [s for s in printed if not s.engine.startswith("transformers")]
        )


def test_what_the_files_say_of_their_target_is_known(dataset, head, tmp_path):
    """The class and the number of blocks, of other trainers' files and of our own."""
    raw = {"speculators_config": {"verifier": {"architectures": ["Gemma3ForCausalLM"]}}}
    raw |= {"num_target_layers": 3, "target_num_hidden_layers": 30}
    facts = with_facts_in(DraftFiles(raw, {}, "here"), TargetFacts())
    assert (facts.architectures, facts.num_layers) == (("Gemma3ForCausalLM",), 30)
    other = TargetFacts(architectures=("Qwen3ForCausalLM",), num_layers=36)
    assert with_facts_in(DraftFiles(raw, {}, "here"), other) == other

    draft = build_draft("eagle3", dataset, head)
    draft.save_pretrained(tmp_path / "any name")
    found = spec_train.export(draft=str(tmp_path / "any name")).findings
    assert not [f.text for f in found["spec-train"] if "decoder blocks is unknown" in f.text]
    assert not [f.text for f in found["vllm"] if "any name" in f.text or "method" in f.text]
    own = draft.files(torch.float32, "x")
    section = own.config["spec_train"] | {"origin": None}
    bare = DraftFiles(own.config | {"spec_train": section}, own.tensors, "x")
    written = write_form(bare, "vllm", TargetFacts())
    config = {k: v for k, v in written.config.items() if k != "spec_train"}
    tiny.write(tmp_path / "p", config | {"num_target_layers": 4}, written.tensors)
    found = spec_train.export(draft=str(tmp_path / "p")).findings
    assert not [f.text for f in found["spec-train"] if "decoder blocks is unknown" in f.text]
