"""What prompts hold beyond the target's files: counted, joined, compared by shares, said."""

import pytest

from spec_data.shards.identity import joined, of_some
from spec_data.shards.serving import (
    OTHERS,
    PromptCounts,
    apart,
    differing_prompts,
    kwargs_text,
    mixture,
    percent,
    prompt_facts,
    prompt_lines,
    sampling_defaults,
    usual_kwargs,
    usual_system,
)

THINKING, SILENT = kwargs_text({"enable_thinking": True}), kwargs_text({"enable_thinking": False})
PIRATE = [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "?"}]
PLAIN = [{"role": "user", "content": "?"}]


def mixed(silent: int, thinking: int) -> dict:
    """The facts of documents without thinking, and of others with ten times the tokens."""
    counts = PromptCounts()
    for value, count, tokens in ((False, silent, 10), (True, thinking, 100)):
        for _ in range(count):
            counts.add(prompt_facts({"enable_thinking": value}, PLAIN, None), tokens)
    return counts.facts()


def differing(recorded: dict, current: dict) -> list[str]:
    words = "the draft was fitted with", "these prompts have"
    return [text for _, text in differing_prompts(recorded, current, *words)]


@pytest.mark.parametrize(
    ("trained", "prompts", "part"),
    [
        ((98, 2), (1, 0), None),  # 2 % of other prompts change little
        ((98, 2), (0, 1), "98 %"),  # but they are not what was trained
        ((55, 45), (1, 0), "45 %"),
        ((55, 45), (0, 1), "55 %"),
        ((55, 45), (11, 9), None),
        ((100, 0), (1, 0), None),
        ((100, 0), (0, 1), "100 %"),
    ],
)
def test_shares_are_compared_and_not_presence(trained, prompts, part):
    lines = differing(mixed(*trained), mixed(*prompts))
    assert len(lines) == (part is not None)
    assert all(f"{part} of the prompts are rendered in another way" in line for line in lines)
    assert all("supervised tokens" in line for line in lines) or trained == (100, 0)


def test_documents_and_supervised_tokens_are_counted():
    facts = mixed(98, 2)
    assert facts["template_kwargs_used"] == {SILENT: 98, THINKING: 2}
    assert facts["template_kwargs_tokens"] == {SILENT: 980, THINKING: 200}
    assert mixture(facts, "template_kwargs_used") == (
        f"{SILENT} in 98 % (83 % of supervised tokens), "
        f"{THINKING} in 2 % (17 % of supervised tokens)"
    )
    assert usual_kwargs(facts) == {"enable_thinking": False}
    assert facts["system_messages"] == {"": 100} and facts["tools_used"] == {"": 100}
    assert [name for name, _ in prompt_lines(facts)] == ["chat template kwargs"]
    assert prompt_lines({"template_kwargs_used": {"{}": 3}, "system_messages": {"": 3}}) == []


def test_system_messages_and_tools_are_compared_and_said():
    with_one, without = PromptCounts(), PromptCounts()
    with_one.add(prompt_facts({}, PIRATE, [{"type": "function"}]), 5)
    without.add(prompt_facts({}, PLAIN, None), 5)
    lines = differing(with_one.facts(), without.facts())
    assert len(lines) == 2 and "'You are a pirate.', these prompts have none" in lines[0]
    assert "tools: the draft was fitted with a list of tools, these prompts have no t" in lines[1]
    assert usual_system(with_one.facts()) == ("You are a pirate.", 1.0)
    assert usual_system(without.facts()) == ("", 0.0)
    facts = without.facts() | {"default_system": "You are Qwen."}
    assert dict(prompt_lines(facts)) == {
        "system message of the template": "'You are Qwen.' where a chat has none"
    }


def test_only_frequent_system_messages_are_kept():
    """A published draft carries them; those of single rows may be private."""
    counts = PromptCounts()
    for row in range(9000):
        messages = PIRATE if row % 3 else [{"role": "system", "content": f"customer {row}"}]
        counts.add(prompt_facts({}, messages, None), 1)
    facts = counts.facts()
    assert facts["system_messages"] == {"You are a pirate.": 6000, OTHERS: 3000}
    assert facts["system_tokens"] == facts["system_messages"]
    long = prompt_facts({}, [{"role": "system", "content": "x" * 5000}], None)["system_messages"]
    assert len(long) < 1100 and "5,000 characters" in long


def test_many_different_kwargs_are_joined_and_may_be_any():
    counts = PromptCounts()
    for day in range(40):
        for _ in range(1 + (day == 7)):
            counts.add(prompt_facts({"day": day}, PLAIN, None), 1)
    used = counts.facts()["template_kwargs_used"]
    assert next(iter(used)) == kwargs_text({"day": 7})
    assert (len(used), used[OTHERS], sum(used.values())) == (17, 24, 41)
    assert apart({"a": 1, OTHERS: 9}, {"b": 1}) == pytest.approx(0.1)
    assert apart({"b": 1}, {"a": 1, OTHERS: 9}) == pytest.approx(0.1)
    assert apart({"a": 2, OTHERS: 8}, {"a": 2, OTHERS: 8}) == pytest.approx(0.0)
    assert apart({OTHERS: 1}, {"a": 1, OTHERS: 1}) == pytest.approx(0.0)


def test_datasets_are_joined_and_views_tell_only_what_is_certain():
    both = joined([mixed(98, 2), mixed(0, 50)])
    assert both["template_kwargs_used"] == {SILENT: 98, THINKING: 52}
    assert both["template_kwargs_tokens"] == {SILENT: 980, THINKING: 5200}
    assert "template_kwargs_used" not in joined([mixed(98, 2), {}])
    assert of_some(mixed(55, 45), 5)["template_kwargs_used"] == {SILENT: 55, THINKING: 45}
    rest = of_some(mixed(55, 45), 20)
    assert not {"template_kwargs_used", "template_kwargs_tokens"} & rest.keys()
    assert rest["system_messages"] == {"": 100}


def test_sampling_that_changes_nothing_is_not_named():
    config = {"temperature": 1.0, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    config |= {"do_sample": True, "eos_token_id": [1, 2], "min_p": 0.0}
    assert sampling_defaults(config) == {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    assert sampling_defaults({"repetition_penalty": 1.0, "top_k": 0, "temperature": None}) == {}


def test_shares_that_are_neither_none_nor_all_are_written_so():
    texts = {0.0: "0 %", 1e-4: "under 1 %", 0.02: "2 %", 0.999: "over 99 %", 1.0: "100 %"}
    assert {share: percent(share) for share in texts} == texts
