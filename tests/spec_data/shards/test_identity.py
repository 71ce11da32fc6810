"""Two identities are compared fact by fact; every difference is named, nothing else is."""

import pytest

from spec_data.shards.identity import (
    OTHERS,
    REFUSE,
    WARN,
    compare,
    count_kwargs,
    kwargs_text,
    usual_kwargs,
)

HASH = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64
IDENTITY = {
    "weights_hash": HASH,
    "config_hash": HASH,
    "architectures": ["LlamaForCausalLM"],
    "quantization": None,
    "dtype": "bfloat16",
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


def test_equal_identities_have_no_difference():
    found = compared(dict(IDENTITY))
    assert (found.texts, found.unknown, found.not_compared) == ([], (), "")


YARN = {
    "config_hash": OTHER,
    "rope.rope_type": "yarn",
    "rope.factor": 4.0,
}


def test_yarn_switched_on_is_named_and_the_hash_of_the_file_is_not_repeated():
    found = compared(IDENTITY | YARN)
    assert found.texts == [
        "factor: the draft was fitted with none, this target has 4.0",
        "rope_type: the draft was fitted with 'default', this target has 'yarn'",
    ]
    assert [d.severity for d in found.differences] == [WARN, WARN]
    assert compared(IDENTITY, IDENTITY | YARN).texts[0].startswith("factor: ")  # switched off
    assert len(compared(IDENTITY | YARN, states=True).refused) == 2


@pytest.mark.parametrize(
    ("change", "said", "decides_states"),
    [
        ({"weights_hash": OTHER}, "weights_hash: ", True),
        ({"config_hash": OTHER}, "not compared by name", True),
        ({"config_hash": OTHER, "config.sliding_window": 8}, "sliding_window: ", True),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures: ", True),
        ({"tokenizer_hash": OTHER}, "text becomes other token ids", False),
        (
            {"tokenizer_hash": OTHER, "tokenizer.pre_tokenizer": "Split 99"},
            "tokenizer.pre_tokenizer: the draft was fitted with 'ByteLevel 0123', this target has "
            "'Split 99'",
            False,
        ),
        ({"tokenizer.bos_token": "<bos>"}, "tokenizer.bos_token: ", False),
        ({"chat_template_hash": OTHER}, "chat_template_hash: ", False),
        ({"chat_template_hash": None}, "chat_template_hash: ", False),
        ({"dtype": "float16"}, "", False),
        ({"dtype": "float32"}, "", False),
        ({"dataset_fingerprint": OTHER}, "", False),
    ],
)
def test_one_change_is_one_line(change, said, decides_states):
    found = compared(IDENTITY | change, states=True)
    assert len(found.texts) == bool(said)
    if said:
        assert said in found.texts[0]
        assert found.differences[0].severity == (REFUSE if decides_states else WARN)


def test_a_coarser_dtype_is_named_and_a_finer_one_is_not():
    exact = IDENTITY | {"dtype": "float32"}
    (line,) = compared(IDENTITY, exact).texts
    assert line.startswith("dtype: the draft was fitted with 'float32', this target has 'bfloat16'")


def test_quantised_serving_is_one_warning():
    change = {"quantization": {"quant_method": "gptq", "bits": 4}, "weights_hash": OTHER}
    found = compared(IDENTITY | change)
    (line,) = found.warned
    assert 'none, this target has {"bits": 4, "quant_method": "gptq"}' in line
    assert found.refused == []


def test_the_same_file_read_by_another_release_of_transformers_is_no_difference():
    newer = {"config.sliding_window": 4096, "config.added_later": 1, "tokenizer.model": "BPE 9"}
    found = compared(IDENTITY | newer)
    assert (found.texts, found.unknown) == ([], ())


def test_kwargs_of_rows_are_compared_as_they_were_used():
    thinking, silent = kwargs_text({"enable_thinking": True}), kwargs_text({"think": False})
    recorded = IDENTITY | {"template_kwargs_used": {silent: 9, thinking: 3}}
    for right in (silent, thinking):
        assert compared({"template_kwargs_used": {right: 1}}, recorded).texts == []
    (line,) = compared({"template_kwargs_used": {"{}": 1, silent: 2}}, recorded).texts
    assert line.startswith(
        'chat_template_kwargs: the draft was fitted with {"think": false} or '
        '{"enable_thinking": true}, this target has {}: '
    )
    assert usual_kwargs(recorded) == {"think": False}
    assert usual_kwargs({"chat_template_kwargs": {"a": 1}}) == {"a": 1}
    assert usual_kwargs({}) is None
    old = {"chat_template_kwargs": {"a": 1}}  # without counts, those of every document
    assert compared({"template_kwargs_used": {kwargs_text({"a": 1}): 1}}, old).texts == []
    assert (
        '{"a": 1}, this target has {}'
        in compared({"template_kwargs_used": {"{}": 1}}, old).texts[0]
    )


def test_many_different_kwargs_are_counted_and_then_not_compared():
    used = count_kwargs({kwargs_text({"day": day}): 1 + (day == 7) for day in range(40)})
    assert next(iter(used)) == kwargs_text({"day": 7})
    assert (len(used), used[OTHERS], sum(used.values())) == (17, 24, 41)
    recorded = IDENTITY | {"template_kwargs_used": used}
    assert compared({"template_kwargs_used": {"{}": 1}}, recorded).texts == []


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
