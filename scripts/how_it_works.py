"""The six drawings of docs/how-it-works.md, made from a stored document and from the real code.

    python scripts/how_it_works.py --data data --draft run --document 41
    python scripts/how_it_works.py  # draws the facts again

The first form reads a dataset and an EAGLE-3 draft. It writes docs/evidence/how-it-works.json:
tokens and masks as stored, slots, packs and masks as the functions of `fit` make them, and what
each unroll step reads, found by changing one input after the other. Both draw docs/how/*.svg from
that file.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from evidence_text import RESULTS, ROOT, Results, kept_answer, read_results
from pictures import arrow, bar, svg, word
from torch import Tensor

import spec_data
import spec_train
from spec_data.shards.packing import shift_left
from spec_train.attention.masks import block_mask, causal_mask
from spec_train.drafts.block.blocks import anchor_candidates, drafted_mask
from spec_train.drafts.slots import slot_masks

FACTS = RESULTS / "how-it-works.json"
STEPS, SLOTS, BLOCK, WINDOW = 3, 14, 5, 160
"""Unroll steps and slots that are shown, slots of a block, slots of the pack."""


# -- facts -----------------------------------------------------------------------------------------


def read_facts(data: str, draft: str, document: int) -> dict[str, Any]:
    """Read what the drawings show of a dataset and an EAGLE-3 draft that was trained on it."""
    ds = spec_data.open_dataset(data)
    model = spec_train.load_draft(draft, dtype="float32").eval()
    doc = ds[document]
    ids, mask = (torch.as_tensor(doc[name]).long() for name in ("input_ids", "loss_mask"))
    shape = ds.manifest
    first = max(0, int(mask.nonzero()[0]) - 3)
    rows = slice(first, min(first + SLOTS, len(ids)))
    texts = [ds.tokenizer.decode([token]) for token in ids.tolist()]
    return {
        "capture": {
            "layers": list(shape.layers),
            "blocks": shape.target.num_layers,
            "hidden_size": shape.hidden_size,
            "tokens": len(ids),
        },
        "document": {"texts": texts, "mask": mask.tolist()},
        "slots": slot_facts(ids, mask, rows),
        "unroll": unroll_facts(model, spec_train.collate([doc]), rows.start + 4),
        "pack": pack_facts(next(iter(spec_train.loader(data, model, seq_len=WINDOW)))),
        "block": block_facts(mask, rows.start + 5),
    }


def slot_facts(ids: Tensor, mask: Tensor, rows: slice) -> list[dict[str, Any]]:
    """Return each slot's state, known and drafted token as places in the document, and its mask.

    The places are moved as `fit` moves the ids, so the picture has the frame of training.
    """
    one = torch.zeros_like(ids)[None]  # a single document
    place = torch.arange(len(ids))[None]
    known = shift_left(place, one)[0].tolist()
    drafted = shift_left(shift_left(place, one), one)[0].tolist()
    trained = slot_masks(shift_left(mask[None], one), one)[0].tolist()
    return [
        {"state": t, "known": known[t], "drafted": drafted[t], "trained": trained[t]}
        for t in range(rows.start, rows.stop)
    ]


@torch.no_grad()
def unroll_facts(model: Any, batch: Any, slot: int) -> list[dict[str, Any]]:
    """Return, for each step of a slot, which states and tokens its output moves with."""
    documents = batch.document_ids
    every = model.states_of(batch)

    def outputs(states: Tensor, ids: Tensor) -> list[Tensor]:
        known = shift_left(ids, documents)
        unroll = model.unroll(states, known, documents, batch.position_ids)
        found = []
        for _ in range(STEPS):
            found.append(unroll.advance(known)[0, slot])
            known = shift_left(known, documents)
        return found

    usual = outputs(every, batch.input_ids)
    facts = [
        {"states": [], "tokens": [], "drafted": slot + 2 + step} for step in range(STEPS)
    ]  # the label of step s is x_{t+2+s}
    for place in range(batch.input_ids.shape[1]):
        states, ids = every.clone(), batch.input_ids.clone()
        states[0, place] *= -1
        ids[0, place] = (ids[0, place] + 1) % 1000
        for name, found in (
            ("states", outputs(states, batch.input_ids)),
            ("tokens", outputs(every, ids)),
        ):
            for fact, new, old in zip(facts, found, usual, strict=True):
                if not torch.equal(new, old):
                    fact[name].append(place)
    return facts


def pack_facts(batch: Any) -> dict[str, Any]:
    """Return the documents of the first pack, its positions, and the keys that each token sees."""
    documents, positions = batch.document_ids[0], batch.position_ids[0]
    seen = causal_mask(batch.document_ids[:1]).dense()[0, 0]
    spans = [[int(row.nonzero()[0]), int(row.nonzero()[-1])] for row in seen]
    return {"documents": documents.tolist(), "positions": positions.tolist(), "spans": spans}


def block_facts(mask: Tensor, anchor: int) -> dict[str, Any]:
    """Return a block that starts at `anchor`: the keys of its slots, and the tokens they draft."""
    one = torch.zeros(1, len(mask), dtype=torch.long)
    assert anchor_candidates(mask[None], one)[0, anchor], "no block starts there in training"
    anchors, real = torch.tensor([[anchor]]), torch.tensor([[True]])
    seen = block_mask(one, anchors, real, BLOCK).dense()[0, 0]
    counted = drafted_mask(mask[None], one, BLOCK)[0, anchor].tolist()
    drafts = [{"drafted": anchor + 1 + d, "trained": counted[d]} for d in range(BLOCK)]
    return {
        "anchor": anchor,
        "keys": [row.nonzero()[:, 0].tolist() for row in seen],
        "drafts": drafts,
    }


# -- drawings --------------------------------------------------------------------------------------


def drawings(facts: Mapping[str, Any], results: Results) -> dict[str, str]:
    """Return every drawing by the name of its file."""
    return {
        "capture.svg": capture(facts),
        "slots.svg": slots(facts),
        "unroll.svg": unroll(facts),
        "pack.svg": pack(facts["pack"]),
        "block.svg": block(facts),
        "round.svg": round_(results),
    }


def shown(text: str) -> str:
    """Return a token as it is written in a cell."""
    return text.replace("\n", "⏎").strip(" ") or "␣"


def cell(x: float, y: float, width: float, text: str, kind: str = "box") -> list[str]:
    """Return a token in a box, 24 high."""
    return [bar(x, y, width, 24, kind), word(x + width / 2, y + 17, text, "mid")]


def capture(facts: Mapping[str, Any]) -> str:
    """Draw the blocks of the target, and what is written of each token."""
    known = facts["capture"]
    layers, hidden, tokens = known["layers"], known["hidden_size"], known["tokens"]
    floor, high = 420, 11
    body = [
        word(90, 26, "the target", "head"),
        word(420, 26, "in the dataset, per document", "head"),
    ]
    stored = {-1: "embedding"} | {layer: f"hidden.L{layer}" for layer in layers}
    for number in range(known["blocks"]):
        y = floor - high * (number + 1)
        body.append(bar(90, y, 160, high - 3, "a" if number in layers else "c"))
        if number in layers:
            body += [word(80, y + 9, f"block {number}", "right"), arrow(254, y + 4, 410, y + 4)]
            body.append(word(420, y + 9, f"{stored[number]}  [{tokens}, {hidden}]"))
    top = floor - high * known["blocks"]
    body += [bar(90, top - 26, 160, 18, "warm"), word(170, top - 12, "last norm", "mid")]
    body += [arrow(254, top - 17, 410, top - 17)]
    body.append(
        word(420, top - 12, f"hidden.final  [{tokens}, {hidden}]: the input of the LM head")
    )
    body += cell(90, floor + 8, 160, "tokens")
    body += [arrow(254, floor + 20, 410, floor + 20)]
    body.append(word(420, floor + 25, f"input_ids, loss_mask  [{tokens}]"))
    body.append(word(420, floor + 43, "the LM head once: it gives the logits back", "dim"))
    return svg(860, floor + 58, "What is captured where in the target", body)


def slots(facts: Mapping[str, Any]) -> str:
    """Draw the stored rows beside the slots that a draft of the EAGLE kind learns from."""
    texts, mask = (facts["document"][name] for name in ("texts", "mask"))
    body = [
        word(20, 26, "stored: the token frame", "head"),
        word(330, 26, "learned: slots", "head"),
    ]
    for x, name in ((20, "t"), (50, "token x_t"), (200, "loss mask")):
        body.append(word(x, 48, name, "dim"))
    for x, name in ((330, "reads the state of"), (480, "knows"), (620, "drafts"), (760, "a loss?")):
        body.append(word(x, 48, name, "dim"))
    for n, slot in enumerate(facts["slots"]):
        t, y = slot["state"], 60 + 28 * n
        body.append(word(20, y + 17, str(t)))
        body += cell(50, y, 130, shown(texts[t]), "soft" if mask[t] else "box")
        body.append(word(225, y + 17, str(mask[t]), "mid"))
        inside = slot["drafted"] > slot["known"] > t
        names = [
            shown(texts[slot[name]]) if inside else "-" for name in ("state", "known", "drafted")
        ]
        body += [
            piece
            for x, text in zip((330, 480, 620), names, strict=True)
            for piece in cell(x, y, 120, text)
        ]
        body.append(
            word(
                785,
                y + 17,
                "yes" if slot["trained"] else "no",
                "mid" if slot["trained"] else "mid dim",
            )
        )
    return svg(
        860, 76 + 28 * len(facts["slots"]), "Stored rows, and the slots that are learned", body
    )


def unroll(facts: Mapping[str, Any]) -> str:
    """Draw which states and tokens each unroll step of one slot reads, and what it drafts."""
    texts, steps = facts["document"]["texts"], facts["unroll"]
    slot = steps[0]["drafted"] - 2
    places = range(slot - 3, slot + len(steps) + 2)
    wide = 92
    body = [word(20, 26, f"slot {slot}: everything before these columns is read as well", "dim")]
    for n, place in enumerate(places):
        x = 100 + wide * n
        body.append(word(x + wide / 2 - 4, 52, str(place), "mid dim"))
        body += cell(x, 60, wide - 8, shown(texts[place]))
    for step, fact in enumerate(steps):
        y = 100 + 66 * step
        body.append(word(20, y + 28, f"step {step}", "head"))
        for n, place in enumerate(places):
            x = 100 + wide * n
            if place in fact["states"]:
                body.append(bar(x, y, wide - 8, 18, "a"))
            if place in fact["tokens"]:
                body.append(bar(x, y + 22, wide - 8, 18, "c"))
            if place == fact["drafted"]:
                body.append(word(x + wide / 2 - 4, y + 28, "drafted", "mid head"))
    end = 100 + 66 * len(steps)
    body += [bar(100, end, 18, 14, "a"), word(126, end + 12, "the target's state is read", "dim")]
    body += [bar(340, end, 18, 14, "c"), word(366, end + 12, "the token is read", "dim")]
    return svg(100 + wide * len(places) + 12, end + 30, "What each step of EAGLE-3 reads", body)


def pack(known: Mapping[str, Any]) -> str:
    """Draw a pack: its documents, their positions, and which earlier tokens each token sees."""
    documents, positions, spans = (known[name] for name in ("documents", "positions", "spans"))
    scale, x0, y0 = 2.4, 130, 60
    body = [word(20, 26, "one row of a batch: whole documents side by side", "dim")]
    size = len(documents)
    for number in sorted(set(documents) - {-1}):
        at = [t for t, document in enumerate(documents) if document == number]
        left, width = x0 + scale * at[0], scale * len(at)
        body += cell(left, 36, width - 2, f"document {number}: {len(at)}", "box")
    for query, (first, last) in enumerate(spans):
        if documents[query] == -1:
            continue
        body.append(
            f'<rect class="a" x="{x0 + scale * first:g}" y="{y0 + 12 + scale * query:g}" '
            f'width="{scale * (last - first + 1):g}" height="{scale + 0.4:g}"/>'
        )
    body.append(word(120, y0 + 40, "a token", "right"))
    body.append(word(120, y0 + 58, "sees", "right dim"))
    floor = y0 + 12 + scale * size + 80
    points = " ".join(
        f"{x0 + scale * t:g},{floor - 60 * p / max(positions):.1f}"
        for t, (p, document) in enumerate(zip(positions, documents, strict=True))
        if document != -1
    )
    body.append(f'<polyline class="line" points="{points}"/>')
    body.append(word(120, floor - 20, "position", "right"))
    body.append(word(x0, floor + 20, f"{documents.count(-1)} of {size} slots are padding", "dim"))
    return svg(
        int(x0 + scale * size + 20), int(floor + 34), "A pack, its mask, its positions", body
    )


def block(facts: Mapping[str, Any]) -> str:
    """Draw a block: its slots, the keys that they see, and the tokens that they draft."""
    texts, known = facts["document"]["texts"], facts["block"]
    anchor, keys = known["anchor"], known["keys"]
    size, length = len(keys), len(texts)
    context = range(anchor - 4, anchor)
    wide = 84
    body = [word(20, 26, "states of the target before the anchor, and the block", "dim")]
    columns = [(place, shown(texts[place]), "box") for place in context]
    columns += [
        (length + n, shown(texts[anchor]) if n == 0 else "mask", "warm" if n == 0 else "c")
        for n in range(size)
    ]
    for n, (_, text, kind) in enumerate(columns):
        body += cell(110 + wide * n, 40, wide - 8, text, kind)
    for row, draft in enumerate(known["drafts"]):
        y = 76 + 32 * row
        body.append(word(20, y + 17, f"slot {row} sees"))
        for n, (key, _, _) in enumerate(columns):
            if key in keys[row]:
                body.append(bar(110 + wide * n, y, wide - 8, 24, "a"))
        x = 110 + wide * len(columns)
        body.append(word(x + 8, y + 17, "drafts"))
        body += cell(
            x + 62, y, wide - 8, shown(texts[draft["drafted"]]) if draft["trained"] else "-"
        )
    body.append(
        word(
            20,
            76 + 32 * size + 16,
            f"the anchor is token {anchor}; earlier tokens are seen as well",
            "dim",
        )
    )
    return svg(
        110 + wide * len(columns) + 62 + wide, 76 + 32 * size + 32, "A block of DSpark", body
    )


def rounds(pieces: Sequence[tuple[str, bool]]) -> list[list[tuple[str, bool]]]:
    """Split an answer into verifications: tokens that were drafted, then the target's own."""
    out: list[list[tuple[str, bool]]] = [[]]
    for text, drafted in pieces:
        out[-1].append((text, drafted))
        if not drafted:
            out.append([])
    return [part for part in out if part]


def round_(results: Results) -> str:
    """Draw the verifications of the kept answer around the one that accepted most."""
    kept = kept_answer(results)
    assert kept is not None, "evidence.py keeps an answer of eagle3"
    parts = rounds([(text, drafted) for text, drafted in kept["pieces"]])
    most = max(range(len(parts)), key=lambda n: len(parts[n]))
    body = [word(20, 26, "each row is one forward of the target", "dim")]
    first = max(0, most - 2)
    for n, part in enumerate(parts[first : most + 2]):
        x, y = 20.0, 40 + 34 * n
        for text, drafted in part:
            width = 20 + 8.5 * len(shown(text))
            body += cell(x, y, width, shown(text), "soft" if drafted else "box")
            x += width + 6
        body.append(word(x + 8, y + 17, f"{len(part)}", "dim"))
    end = 40 + 34 * (most + 2 - first) + 6
    body += [
        bar(20, end, 18, 14, "soft"),
        word(46, end + 12, "drafted, and accepted by the target", "dim"),
    ]
    body += [
        bar(340, end, 18, 14, "box"),
        word(366, end + 12, "the target's own token, which ends the row", "dim"),
    ]
    return svg(860, end + 32, "Verifications of a real answer", body)


def main() -> None:
    """Write the facts, if a dataset is named, and the drawings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="a dataset with layers for --draft")
    parser.add_argument("--draft", help="an EAGLE-3 draft that was trained on it")
    parser.add_argument("--document", type=int, default=0)
    args = parser.parse_args()
    if args.data:
        facts = read_facts(args.data, args.draft, args.document)
        FACTS.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    for name, drawn in drawings(facts, read_results()).items():
        (ROOT / "docs" / "how" / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
