"""The metrics of an evaluation as a table for people: name, value, meaning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_data.terminal.text_table import text_table
from spec_train.losses.metrics import shown
from spec_train.simulation.intervals import LEVEL
from spec_train.simulation.ranges import range_text

Line = tuple[str, str, str]

_FEW, _ROWS = 3, 8  # sets are lines of their own up to so many; --json has all


def table(report: dict[str, Any], everything: bool = False, page: Path | None = None) -> str:
    """Return the metrics as aligned lines; the first one is the length to trust most."""
    real = "target" in report
    lines = _target_lines(report["targets"]) if "targets" in report else []
    lines += _decoding_lines(report, everything) if real and (everything or not lines) else []
    served = report.get("server")
    if "data" in report and (everything or served or not real):
        lines += _data_lines(report, everything)
    if served:
        lines = _server_lines(served, everything) + lines
    if page:
        lines.append(("page", "", str(page)))
    return text_table(lines, "<><")


def _target_lines(targets: list[dict[str, Any]]) -> list[Line]:
    """Return a line for each of several targets, the first one with what the others differ from."""
    lines = [("by target", "", "acceptance length, and its difference from the first target")]
    for one in targets:
        meaning = _between(one["interval"])
        if against := one.get("against_first"):
            low, high = against["interval"]
            meaning += f"{against['difference']:+.2f} ({low:+.2f} to {high:+.2f}, "
            meaning += f"p = {against['p_value']:.2g}), "
        elif "against_first" in one:
            meaning += "other prompts than the first's (another chat template), "
        meaning += f"accepted by depth {_rates(one['accept_rate'])}"
        if one["identical"] is not None:
            meaning += f", lossless {one['identical']}/{one['responses']}"
        lines.append((f"  {one['target']}", shown(one["acceptance_length"]), meaning))
    return lines


def _server_lines(served: dict[str, Any], everything: bool) -> list[Line]:
    """Return what a live server counted; without positions it has no rates."""
    drafted = f", {served['draft_tokens']} drafted each" if served["draft_tokens"] else ""
    meaning = (
        f"{_between(served['interval'])}counted by {served['engine']} in {served['answers']:,} "
        f"answers{drafted}"
    )
    lines = [("deployed length", shown(served["acceptance_length"]), meaning)]
    if served["accept_rate"]:
        lines.append(_by_depth(served["accept_rate"]))
    if len(served["by_set"]) > 1:
        lines += _set_lines(served["by_set"], _ROWS if everything else _FEW)
    return lines


def _decoding_lines(report: dict[str, Any], everything: bool) -> list[Line]:
    kind = "greedy" if report["temperature"] == 0 else f"temperature {report['temperature']:g}"
    depth, nodes = report["draft_tokens"], report["tree_tokens"]
    drafted = (
        f"trees of {nodes} drafted tokens, depth {depth}" if nodes else f"{depth} drafted each"
    )
    answered = sum(line["rounds"] > 0 for line in report["per_prompt"])
    between = _between(report["interval"])
    with_draft, plain = report["tokens_per_second"], report["plain_tokens_per_second"]
    length = shown(report["acceptance_length"])
    lines = [
        (
            "acceptance length",
            length,
            f"{between}real decoding of {answered:,} prompts, {kind}, {drafted}",
        )
    ]
    if everything:
        where = f"{report['target']}, {report['dtype']}, {report['device']}"
        lines.append(("  on", "", where))
    lines.append(_by_depth(report["accept_rate"]))
    if report["identical"] is not None:
        wrong = len(report["different"])
        meaning = f"responses equal to plain greedy decoding; {report['ties']} ties, {wrong} wrong"
        lines.append(("  lossless", f"{report['identical']}/{report['responses']}", meaning))
    if kinds := report.get("stepwise"):
        meaning = (
            f"not measured: the target's cache ({kinds}) cannot be rolled back, so its tokens are "
            "verified one by one; the response and the acceptance are the same"
        )
        lines.append(("  speed-up", "-", meaning))
    elif report["rounds"]:  # else the draft took no part
        meaning = (
            f"{_between(report['speedup_interval'])}in this implementation, over "
            f"{report['timed_pairs']} responses, prefill included: "
            f"{with_draft:.1f} tokens/s with the draft, {plain:.1f} with the target alone"
        )
        lines.append(("  speed-up", shown(report["speedup"], 2) + "x", meaning))
    modelled = report["modelled"]
    if modelled["speedup"] is not None:
        passes = f"{modelled['passes_per_round']:.1f} draft passes per verification"
        meaning = f"{_shown_costs(modelled)}; {passes}, prefill left out"
        lines.append(("  modelled speed-up", f"{modelled['speedup']:.2f}x", meaning))
    if report["bad_prompts"]:
        lines.append(("  bad prompts", f"{report['bad_prompts']:,}", "rows that were left out"))
    count, problem = report["trained_prompts"], report["trained_prompts_not_compared"]
    meaning = f"of {report['prompts']:,} prompts are in training documents"
    if count is None:
        meaning = f"not checked: {problem}"
    elif problem:
        meaning += f"; not all were compared: {problem}"
    if count or everything:
        lines.append(("  trained on", "-" if count is None else f"{count:,}", meaning))
    if report["too_long"]:
        lines.append(("  skipped", str(len(report["too_long"])), "prompts that fill the context"))
    if len(report["by_set"]) > 1:
        lines += _set_lines(report["by_set"], _ROWS if everything else _FEW)
    if len(report["sweep"]) > 1:
        lines += _sweep_lines(report)
    return lines + (_part_lines(report) if everything else [])


def _between(interval: Sequence[float] | None) -> str:
    """Say how far a figure would move with other prompts or documents of the same kind."""
    return "" if interval is None else "{:.2f} to {:.2f} ({:.0%}), ".format(*interval, LEVEL)


def _by_depth(rates: list[float | None]) -> Line:
    return ("  accepted by depth", "", f"{_rates(rates)}, each if those before it were")


def _rates(rates: list[float | None]) -> str:
    return " ".join("-" if r is None else f"{r:.2f}" for r in rates)


def _shown_costs(modelled: dict[str, Any]) -> str:
    return (
        f"if a draft pass costs {modelled['cost_ratio']:.3g} target passes and a verification "
        f"{modelled['verification_ratio']:.3g}"
    )


def _set_lines(sets: list[dict[str, Any]], most: int) -> list[Line]:
    lines = [("by set", "", "acceptance length, its interval, and what is accepted by depth")]
    for one in sets[:most]:
        between = "" if one["interval"] is None else "{:.2f}-{:.2f}, ".format(*one["interval"])
        rates = _rates(one["accept_rate"])
        meaning = f"{between}{one['prompts']:,} prompts" + f", {rates}" * bool(rates)
        lines.append((f"  {one['set']}", shown(one["acceptance_length"]), meaning))
    if len(sets) > most:
        lines.append(("  ...", "", f"{len(sets) - most} more in --json"))
    return lines


def _sweep_lines(report: dict[str, Any]) -> list[Line]:
    """Return a line for each number of drafted tokens."""
    known = [line["modelled"] for line in report["sweep"] if line["modelled"]["speedup"]]
    costs = {_shown_costs(modelled) for modelled in known}
    meaning = "modelled with the costs measured for each" if costs else ""
    if len(costs) == 1:
        meaning = f"modelled {costs.pop()}"
    lines = [("drafted tokens", "", meaning)]
    for line in report["sweep"]:
        modelled, best = line["modelled"]["speedup"], ""
        if line["draft_tokens"] == report["best_draft_tokens"]:
            slower = "" if modelled > 1 else ", but no faster than the target alone"
            best = f"  <- fastest{slower}"
        expected, measured = (
            "unknown" if value is None else f"{value:.2f}x" for value in (modelled, line["speedup"])
        )
        meaning = f"modelled {expected}, measured here {measured}{best}"
        lines.append((f"  {line['draft_tokens']}", shown(line["acceptance_length"]), meaning))
    return lines


def _part_lines(figures: dict[str, Any]) -> list[Line]:
    """Return a line for each range of positions in the answer and of contexts, and each mode."""
    lines: list[Line] = []
    titles = {"by_position": "tokens of the answer", "by_context": "tokens of the context"}
    for name, title in titles.items():
        some = figures[name]
        if len(some) > 1:
            lines.append((f"by {title}", "", "acceptance length at verifications behind so many"))
            lines += [_part_line(range_text(one["start"], one["end"]), one) for one in some]
    if modes := figures["by_mode"]:
        lines.append(("by mode", "", "acceptance length of such answers"))
        lines += [_part_line(one["mode"], one) for one in modes]
    return lines


def _part_line(name: str, one: dict[str, Any]) -> Line:
    meaning = f"{_between(one['interval'])}{one['rounds']:,} verifications"
    return f"  {name}", shown(one["acceptance_length"]), meaning


def _data_lines(report: dict[str, Any], everything: bool) -> list[Line]:
    """Return the lines of a dataset; without real decoding, its length stands first."""
    data, real = report["data"], "target" in report
    simulated, forced = data["simulated"], data["teacher_forced"]
    documents = f"{data['documents']:,} documents"
    mask = f", mask {data['mask']}" if data["mask"] else ""
    dataset = ("dataset", "", f"{data['path']}, {data['split']}: {documents}{mask}")
    length = (
        "  simulated length" if real else "acceptance length",
        shown(simulated["acceptance_length"]),
        f"{_between(simulated['interval'])}simulated on {documents} ({data['split']}), as in "
        "greedy decoding",
    )
    lines = [length, _by_depth(simulated["accept_rate"])]
    if everything:
        meaning = "the draft reads the documents' own tokens at every depth, as in training"
        figure = shown(forced["acceptance_length"])
        lines = [dataset, *lines, ("  teacher-forced length", figure, meaning)]
    of = f"of {data['supervised_tokens']:,} tokens are the target's own greedy choice"
    lines.append(("  on-policy", f"{data['on_policy']:.1%}", of))
    if report.get("gap") is not None:
        meaning = "simulated minus real length; the texts differ unless --data has these answers"
        lines.append(("  minus real", f"{report['gap']:+.3f}", meaning))
    return lines + (_part_lines(data) if everything and not real else [])
