"""A copy of a draft with another configuration, other tensors or another vocabulary map."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from spec_train.drafts import Draft

Tensors = dict[str, Tensor]


def altered(
    draft: Draft,
    changes: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], Tensors] | None = None,
    ids: Tensor | None = None,
) -> Draft:
    """Return a draft of the same class that computes something else; `draft` stays as it is.

    A norm that the changed configuration adds has a weight of ones, because no file holds another;
    one that it no longer has is left out.

    Args:
        draft: the draft, whose tensors are shared where they do not change.
        changes: fields of its configuration.
        tensors: changes a copy of the dict of its tensors.
        ids: target ids of the draft vocabulary, int64 [Vd], in the order of the head's rows; None:
            as they are.

    Raises:
        DraftError, ValueError, RuntimeError: such a draft cannot exist.
    """
    source: Any = draft
    state: Tensors = dict(source.state_dict())
    if tensors is not None:
        state = tensors(state)
    if ids is not None:
        ids, order = ids.sort()
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            if name in state:
                state[name] = state[name][order.to(state[name].device)]
    config = dataclasses.replace(draft.config, **(changes or {}))
    other = type(source)(config, draft.options)
    weight = source.fc.weight
    other.to(weight.device, weight.dtype)
    fresh = other.state_dict()
    added = [name for name in fresh if name not in state and "norm" not in name]
    if added:
        raise ValueError(f"the draft has no {', '.join(added)}")
    other.load_state_dict({name: state.get(name, value) for name, value in fresh.items()})
    if not other.full_vocabulary:
        other.set_vocabulary(draft.draft_ids if ids is None else ids)
    result: Draft = other.eval()
    return result
