"""Write the lists of docs/corpus.md that say what columns of a row and keys of a message mean.

    python scripts/corpus_facts.py

They come from spec_data/corpus/facts.toml; a test compares them.
"""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from spec_data.corpus.facts import FACTS, Fact

PAGE = Path(__file__).parents[1] / "docs" / "corpus.md"
_WIDTH = 120
_MANY = 30  # names; of more the first ones are shown


def listed(facts: Iterable[Fact]) -> str:
    """Return the facts as a list, one line or more for each."""
    return "\n".join(
        textwrap.fill(
            f"- {_names(fact)} — {fact.text}",
            _WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for fact in facts
    )


def _names(fact: Fact) -> str:
    names = [f"`{name}`" for name in fact.names]
    if len(names) > _MANY:
        names = [*names[:_MANY], "and more of the kind"]
    return ", ".join(names)


def page(text: str) -> str:
    """Return a page with the lists of columns and keys between their marks written anew."""
    for mark, facts in (("columns", FACTS.column), ("keys", FACTS.key)):
        between = rf"(<!-- {mark} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            between, lambda m, f=facts: m[1] + listed(f) + "\n" + m[2], text, flags=re.DOTALL
        )
        assert count == 1, f"{PAGE} has no list of {mark}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
