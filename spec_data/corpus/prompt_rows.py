"""Turn one row of prompts into a `Record` that ends where the target is to answer.

`spec-train eval` reads its prompts here, with the code that reads a corpus: a prompt that is read
in another way is rendered in another way, and acceptance falls without an error. Rows may hold a
question alone: `prompt` or `question` (a string or messages), or `turns`, the user messages of
MT-bench, which are sent one after the other, each after the answer to the one before. Messages of
the user alone are such turns too: that is how SPEED-Bench is written by its own script.

SPEED-Bench on the Hub has a notice in place of questions that it may not redistribute. Such a row
is bad: the target would answer the notice.
"""

from dataclasses import replace
from typing import Any

from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.records import Record, checked_row, foreseen, record_of

_NOTICE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # of SPEED-Bench

PROMPT_FORMATS = (
    *("messages", "conversations", "turns", "prompt", "question", "instruction", "input_ids"),
    "text",
)


@foreseen
def parse_prompt(row: Any, *, source: str, where: str, arrow: bool = False) -> tuple[str, Record]:
    """Return (format name, Record) of one row of prompts; the arguments are those of `parse_row`.

    Answers at the end of the messages are dropped. Several messages, all of the user, are turns:
    the first one is the prompt, the others follow its answer. Of `input_ids` the tokens before the
    first supervised one remain, or all if there is none before it. A row with a string as `prompt`
    or `question` is of kind "prompt" and has one user message.

    Raises:
        BadRow: the row has no known format, is broken, asks nothing, or has SPEED-Bench's notice.
    """
    kind = None
    if isinstance(row, dict):
        kind = next((name for name in PROMPT_FORMATS if row.get(name) is not None), None)
    row = checked_row(row, kind, PROMPT_FORMATS, arrow)
    record = record_of(str(kind), row, source=source, where=where)
    if record.messages is not None:
        if kind in ("messages", "conversations"):
            record = _in_turns(record)
        elif kind in ("prompt", "question"):
            kind = "prompt" if isinstance(row[kind], str) else "messages"
        record = replace(record, messages=_asked(record.messages or []), kind=str(kind))
        _refuse_notice(record)
    elif record.input_ids is not None:
        mask = record.loss_mask or []
        end = mask.index(1) if 1 in mask else 0
        record = replace(record, input_ids=record.input_ids[: end or None], loss_mask=None)
    return str(kind), record


def _in_turns(record: Record) -> Record:
    """Return a record of user messages alone as the first one, with the others as follow-ups.

    A row with an answer stays as it is: its document has no answers between those messages.
    """
    messages = record.messages or []
    texts = [m["content"] for m in messages if m["role"] == "user"]
    if len(texts) < 2 or len(texts) < len(messages):
        return record
    return replace(record, messages=messages[:1], follow_ups=tuple(texts[1:]))


def _refuse_notice(record: Record) -> None:
    asked = [*(m.get("content") or "" for m in record.messages or ()), *record.follow_ups]
    if any(_NOTICE in text for text in asked):
        raise BadRow(
            "a notice of SPEED-Bench in place of the question; NVIDIA's prepare_data.py "
            "(Model-Optimizer, examples/specdec_bench) writes a file with all questions"
        )


def _asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages before the answers at the end."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    last = messages[end - 1]["role"] if end else "nothing"
    if last not in ("user", "tool"):
        raise BadRow(f"the last message before the answer must be of a user or a tool, not {last}")
    return messages[:end]
