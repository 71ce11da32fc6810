"""Two identities are compared fact by fact; every difference is named, nothing else is."""

import pytest

from spec_data.shards.identity import REFUSE, WARN, compare, of_some
from spec_data.shards.serving import kwargs_text, usual_kwargs

HASH = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64
IDENTITY = {
    "weights_hash": HASH,
    "config_hash": HASH,
    "architectures": ["LlamaForCausalLM"],
    "quantization": None,
    "dtype": "float32",
    "config.num_hidden_layers": 6,
    "config.sliding_window": None,
    "rope.rope_type": "default",
    "rope.rope_theta": 10000.0,
    "tokenizer_hash": HASH,
    "tokenizer.model": "BPE 0123",
    "tokenizer.pre_tokenizer": "ByteLevel 0123",
    "tokenizer.bos_token": "<s>",
    "chat_template_hash": HASH,
    "chat_template_kwargs": {},
    "template_kwargs_used": {"{}": 12},
}


def compared(found: dict, recorded: dict = IDENTITY, states: bool = False):
    words = {"of_recorded": "the draft was fitted with", "of_current": "this target has"}
    return compare(recorded, found, **words, states=states)


YARN = {"config_hash": OTHER, "rope.rope_type": "yarn", "rope.factor": 4.0}
QUANTISED = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("change", "said", "decides_states"),
    [
        ({}, (), False),
        (
            YARN,
            ("factor: the draft was fitted with none, this target has 4.0", "rope_type: "),
            True,
        ),
        ({"weights_hash": OTHER}, ("weights_hash: ",), True),
        ({"config_hash": OTHER}, ("not compared by name",), True),
        ({"config_hash": OTHER, "config.sliding_window": 8}, ("sliding_window: ",), True),
        ({"architectures": ["Qwen3ForCausalLM"]}, ("architectures: ",), True),
        ({"quantization": QUANTISED, "weights_hash": OTHER}, ('{"bits": 4, "quant_',), True),
        ({"tokenizer_hash": OTHER}, ("text becomes other token ids",), False),
        (
            {"tokenizer_hash": OTHER, "tokenizer.pre_tokenizer": "Split 99"},
            ("fitted with 'ByteLevel 0123', this target has 'Split 99'",),
            False,
        ),
        ({"tokenizer.bos_token": "<bos>"}, ("tokenizer.bos_token: ",), False),
        ({"chat_template_hash": None}, ("chat_template_hash: ",), False),
        ({"dtype": "float16"}, ("dtype: ",), False),
        ({"dtype": "bfloat16"}, ("rounds more coarsely",), False),
        ({"dataset_fingerprint": OTHER}, (), False),
        # the same files, read by another release of transformers
        (
            {"config.sliding_window": 4096, "config.added_later": 1, "tokenizer.model": "B"},
            (),
            False,
        ),
    ],
)
def test_every_difference_is_one_line(change, said, decides_states):
    here = compared(IDENTITY | change, states=True)
    assert len(here.texts) == len(said) and here.unknown == ()
    assert all(part in text for part, text in zip(said, here.texts, strict=True))
    wanted = REFUSE if decides_states else WARN
    assert {d.severity for d in here.differences} <= {wanted}
    assert compared(IDENTITY | change).refused == []


def test_usual_kwargs_and_what_a_view_still_knows():
    thinking, silent = kwargs_text({"enable_thinking": True}), kwargs_text({"think": False})
    recorded = IDENTITY | {"template_kwargs_used": {silent: 9, thinking: 3}}
    assert usual_kwargs(recorded) == {"think": False}
    assert usual_kwargs({"chat_template_kwargs": {"a": 1}}) == {"a": 1}
    assert usual_kwargs({}) is None
    assert of_some(recorded, 5) == recorded, "most of what is left has the same ones"
    unclear = of_some(recorded | {"chat_template_kwargs": {"think": False}}, 6)
    assert unclear.keys() == IDENTITY.keys() - {"chat_template_kwargs", "template_kwargs_used"}
    assert of_some(IDENTITY, 11) == IDENTITY
    old = {"chat_template_kwargs": {"a": 1}}  # without counts, those of every document
    assert compared({"template_kwargs_used": {kwargs_text({"a": 1}): 1}}, old).texts == []


def test_special_tokens_are_named_where_the_tokenizer_itself_was_compared():
    """The hash of tokenizer.json does not cover them."""
    older = {k: v for k, v in IDENTITY.items() if not k.startswith("tokenizer.")}
    assert compare(older, IDENTITY, of_recorded="a", of_current="b").not_compared == "bos_token"


def test_what_only_one_side_tells_is_unknown_and_no_difference():
    found = compared(IDENTITY, {"weights_hash": HASH, "chat_template_kwargs": {}})
    assert found.texts == []
    assert found.not_compared == (
        "architectures, chat_template_hash, config, config_hash, quantization, rope, bos_token, "
        "tokenizer, tokenizer_hash"
    )
    old = {name: IDENTITY[name] for name in ("weights_hash", "config_hash", "tokenizer_hash")}
    assert "rope" not in compared(IDENTITY, old).not_compared  # the file is the same
