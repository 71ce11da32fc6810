"""A diagnosis as lines for people: findings first, then what is sound, then what is undecided."""

from collections.abc import Iterable, Iterator

from spec_train.diagnosis.outcome import FINDING, OK, UNDECIDED, Check, Diagnosis

_MARKS = {FINDING: "FINDING", OK: "ok", UNDECIDED: "not decidable"}
_SHOWN = 6  # conventions of a round
_WIDTH = max(map(len, _MARKS.values()))


def diagnosis_text(found: Diagnosis) -> str:
    """Return the lines of a diagnosis."""
    lines = [f"{found.draft}: {found.kind or 'not readable as a draft'}"]
    if found.documents:
        where = f"{found.documents} documents"
        if found.which_documents:
            where += f" ({found.which_documents})"
        length = found.acceptance_length
        lines[0] += (
            f", tried on {where}"
            if length is None
            else f", acceptance length {length:.2f} over all slots of {where}"
        )
    for state in (FINDING, OK, UNDECIDED):
        lines += _lines(check for check in found.checks if check.state == state)
    lines += _table(found)
    count = len(found.findings)
    lines.append(f"{found.draft}: {count or 'no'} finding{'' if count == 1 else 's'}")
    return "\n".join(lines)


def _lines(checks: Iterable[Check]) -> Iterator[str]:
    for check in checks:
        mark = _MARKS[check.state].ljust(_WIDTH)
        yield f"{mark}  {check.name}: {check.text}"
        indent = " " * (_WIDTH + 2)
        if check.state == FINDING:
            yield from (f"{indent}evidence: {line}" for line in check.evidence)
            yield f"{indent}fix: {check.fix}"
        else:
            yield from (f"{indent}{line}" for line in check.evidence)


def _table(found: Diagnosis) -> Iterator[str]:
    """Yield the tried conventions, the best of each round first."""
    if not found.tried:
        return
    yield "conventions tried: acceptance length, p-value; loss, p-value"
    for number in sorted({tried.round for tried in found.tried}):
        some = [tried for tried in found.tried if tried.round == number]
        losses = [f"{t.loss_before:6.3f}" for t in some if t.loss_before is not None]
        words = "as declared" if number == 1 else "with the better convention above"
        yield f"  {some[0].before:6.3f}          {(losses or [' ' * 6])[0]}           {words}"
        ordered = sorted(some, key=lambda t: t.rank, reverse=True)
        for tried in ordered[:_SHOWN]:
            mark = "better " if tried.better else ""
            loss = " " * 15
            if tried.loss is not None and tried.loss_p_value is not None:
                loss = f"{tried.loss:6.3f} {tried.loss_p_value:7.2g} "
            yield (
                f"  {tried.length:6.3f} {tried.p_value:7.2g}  {loss}  {mark}{tried.check}: "
                f"{tried.text}"
            )
        if len(ordered) > _SHOWN:
            shorter = ordered[_SHOWN].length
            yield f"  and {len(ordered) - _SHOWN} more, of at most {shorter:.3f} (--json has all)"
