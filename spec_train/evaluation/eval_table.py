"""The figures of an evaluation as a table for people: name, value, meaning."""

from collections.abc import Sequence
from typing import Any

from spec_data.terminal.text_table import text_table
from spec_train.evaluation.trained_prompts import prompt_lines
from spec_train.losses.metrics import shown
from spec_train.simulation.intervals import LEVEL

Line = tuple[str, str, str]

_GIVEN = ", each if those before it were"
_ROWS = 8  # sets and contexts are lines of their own up to so many; --json has all


def table(report: dict[str, Any]) -> str:
    """Return the metrics as aligned lines: name, value, meaning."""
    return text_table(_lines(report), "<><")


def _lines(report: dict[str, Any]) -> list[Line]:
    """Return the lines of the table."""
    lines: list[Line] = []  # the first one is the length to trust most
    if "target" in report:
        lines += _decoding_lines(report)
    if "data" in report:
        lines += _data_lines(report["data"], real="target" in report)
        lines += _gap_lines(report)
    return lines


def _decoding_lines(report: dict[str, Any]) -> list[Line]:
    kind = "greedy" if report["temperature"] == 0 else f"temperature {report['temperature']:g}"
    answered = sum(line["rounds"] > 0 for line in report["per_prompt"])
    over = _between(report["interval"], f"{answered:,} prompts")
    lines = [
        (
            "acceptance length",
            shown(report["acceptance_length"]),
            f"tokens per verification in real decoding{over}",
        ),
        (
            "real decoding",
            "",
            f"{report['target']}, {kind}, {report['dtype']}, {report['device']}, "
            f"{_drafted(report)}",
        ),
        ("  accepted by depth", "", _rates(report["accept_rate"]) + _GIVEN),
        (
            "  rounds",
            f"{report['rounds']:,}",
            f"verifications, in {report['responses']:,} responses; {report['draft_passes']:,} "
            "passes of the draft",
        ),
        (
            "  tokens",
            f"{report['tokens']:,}",
            f"{report['stopped']:,} responses ended with a stop token",
        ),
        (
            "  tokens/s",
            f"{report['tokens_per_second']:.1f}",
            "with the draft, prefill included" + _of_those_alone(report),
        ),
        ("  tokens/s plain", f"{report['plain_tokens_per_second']:.1f}", "the target alone"),
        (
            "  speed-up",
            shown(report["speedup"], 2) + "x",
            f"in this implementation, batch of one; over {report['timed_pairs']} responses",
        ),
    ]
    lines += _cost_lines(report)
    if report["identical"] is not None:
        wrong = len(report["different"])
        meaning = f"responses equal to plain greedy decoding; {report['ties']} ties, {wrong} wrong"
        lines.append(("  lossless", f"{report['identical']}/{report['responses']}", meaning))
    lines += prompt_lines(report)
    if report["too_long"]:
        lines.append(("  skipped", str(len(report["too_long"])), "prompts that fill the context"))
    return lines + _set_lines(report["by_set"]) + _sweep_lines(report)


def _between(interval: Sequence[float] | None, of: str) -> str:
    """Say how far a length would move with other prompts or documents of the same kind."""
    if interval is None:
        return ""
    low, high = interval
    return f"; {LEVEL:.0%} interval {low:.2f} to {high:.2f} over {of}"


def _cost_lines(report: dict[str, Any]) -> list[Line]:
    """Say where the time went, and what speed-up follows from the costs of passes."""
    shares, modelled = report["speed"]["shares"], report["modelled"]
    lines = []
    if None not in shares.values():
        parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        lines.append(("  time with the draft", "", parts))
    if modelled["speedup"] is not None:
        lines.append(
            (
                "  modelled speed-up",
                f"{modelled['speedup']:.2f}x",
                f"{_shown_costs(modelled)}; {modelled['passes_per_round']:.1f} draft passes per "
                "round, prefill left out",
            )
        )
    return lines


def _shown_costs(modelled: dict[str, Any]) -> str:
    return (
        f"if a draft pass costs {modelled['cost_ratio']:.3g} target passes and a verification "
        f"{modelled['verification_ratio']:.3g}"
    )


def _set_lines(sets: list[dict[str, Any]]) -> list[Line]:
    """Return a line for each set of prompts, if there are several."""
    if len(sets) < 2:
        return []
    lines = [("by set", "", "acceptance length, its interval, and what is accepted by depth")]
    for one in sets[:_ROWS]:
        between = "" if one["interval"] is None else "{:.2f}-{:.2f}, ".format(*one["interval"])
        count = f"{one['prompts']:,} prompts, "
        rates = _rates(one["accept_rate"])
        lines.append((f"  {one['set']}", shown(one["acceptance_length"]), between + count + rates))
    if len(sets) > _ROWS:
        lines.append(("  ...", "", f"{len(sets) - _ROWS} more in --json"))
    return lines


def _sweep_lines(report: dict[str, Any]) -> list[Line]:
    """Return a line for each number of drafted tokens, if several were compared."""
    sweep = report["sweep"]
    if len(sweep) < 2:
        return []
    lines = [("drafted tokens", "", f"modelled {_shown_costs(report['modelled'])}")]
    for line in sweep:
        modelled = line["modelled"]["speedup"]
        expected = "unknown" if modelled is None else f"{modelled:.2f}x"
        measured = "unknown" if line["speedup"] is None else f"{line['speedup']:.2f}x"
        best = _best(line, report["best_draft_tokens"])
        lines.append(
            (
                f"  {line['draft_tokens']}",
                shown(line["acceptance_length"]),
                f"modelled {expected}, measured here {measured}{best}",
            )
        )
    return lines


def _best(line: dict[str, Any], best: int | None) -> str:
    """Mark the fastest number of drafted tokens, and say if plain decoding is no slower."""
    if line["draft_tokens"] != best:
        return ""
    faster = line["modelled"]["speedup"] > 1
    return "  <- fastest" + ("" if faster else ", but no faster than the target alone")


def _gap_lines(report: dict[str, Any]) -> list[Line]:
    """Say how far the simulated length is from that of real decoding."""
    if "target" not in report:
        meaning = "real decoding was not measured: add --target and --prompts to see the difference"
        return [("  minus real", "-", meaning)]
    if report["gap"] is None:
        return []
    meaning = "simulated minus real length; the texts differ unless --data has these answers"
    return [("  minus real", f"{report['gap']:+.3f}", meaning)]


def _of_those_alone(report: dict[str, Any]) -> str:
    """Say which responses were timed, if others were decoded in batches."""
    width = report["batch_prompts"]
    return "" if width == 1 else f"; the first responses, one by one (later: batches of {width})"


def _drafted(report: dict[str, Any]) -> str:
    depth, nodes = report["draft_tokens"], report["tree_tokens"]
    return f"trees of {nodes} drafted tokens, depth {depth}" if nodes else f"{depth} drafted each"


def _data_lines(data: dict[str, Any], real: bool = False) -> list[Line]:
    """Return the lines of a dataset; without real decoding, its length stands first."""
    walk, slots, forced = data["walk"], data["slots"], data["teacher_forced"]
    documents = f"{data['documents']:,} documents"
    where = f"{data['path']}, {data['split']}: {documents}"
    place = ("dataset", "", where + (f", mask {data['mask']}" if data["mask"] else ""))
    length = (
        ("  " if real else "") + "serving-like length",
        shown(walk["acceptance_length"]),
        "tokens per verification where the draft continues its own tokens on stored documents: "
        f"predicts real greedy decoding{_between(walk.get('interval'), documents)}",
    )
    lines = [
        *([place, length] if real else [length, place]),
        ("  accepted by depth", "", _rates(walk["accept_rate"]) + _GIVEN),
        ("  rounds", f"{walk['rounds']:,}", "verifications, from the start of each answer on"),
        (
            "  over all slots",
            shown(slots["acceptance_length"]),
            f"the same if a round began at every supervised token, {slots['rounds']:,} chains; "
            "decoding meets hard tokens more often",
        ),
        *_forced_lines(forced),
        (
            "  on-policy",
            f"{data['on_policy']:.1%}",
            f"of {data['supervised_tokens']:,} tokens are the target's own greedy choice",
        ),
        ("  censored", f"{walk['censored']:.1%}", "of rounds leave the document; estimated there"),
    ]
    if data["missing_mass"] is not None:
        meaning = "of the target's probability is outside the stored logits: expected_acceptance/*"
        meaning += " (--json) and tau are lower bounds, too low by at most that"
        lines.append(("  missing mass", f"{data['missing_mass']:.2%}", meaning))
    return lines


def _forced_lines(forced: dict[str, Any]) -> list[Line]:
    known = [name for d in range(1, len(forced)) if (name := f"accept_rate/{d}") in forced]
    return [
        (
            "  teacher-forced length",
            shown(forced["acceptance_length"]),
            "the draft reads the documents' own tokens at every depth, as in training; serving "
            "does not",
        ),
        ("  accepted by depth", "", _rates([forced[name] for name in known]) + _GIVEN),
    ]


def _rates(rates: list[float | None]) -> str:
    return " ".join("-" if r is None else f"{r:.2f}" for r in rates)
