"""Measure what the target thinks of the supervised tokens, from logits that exist anyway.

Shapes: N tokens, m tokens with a supervised next token, V vocabulary size.
"""

import numpy as np
import torch
from torch import Tensor

NOT_SUPERVISED = -1
# Nats. A target that masks part of its vocabulary assigns a token no probability at all.
_LARGEST_NLL = 1e4


def supervised_next(ids: np.ndarray, predicting: np.ndarray) -> np.ndarray:
    """Return the next token of each token where it is supervised, else -1: int64 [N].

    Args:
        ids: token ids of documents one after another, integers [N].
        predicting: which tokens have a supervised next token in their document, bool [N].
    """
    following = np.full(len(ids), NOT_SUPERVISED, np.int64)
    following[:-1] = ids[1:]
    following[~predicting] = NOT_SUPERVISED
    return following


def log_sum_exp(logits: Tensor, argmax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of logits, float32 [m], and exp(logits - largest), float32 [m, V].

    The exponentials cost more than all other steps together, so they are computed once, for both.
    `argmax` is that of the logits float32 [m, V], int64 [m]. The result is not finite if the
    largest logit is not.
    """
    largest = logits.gather(-1, argmax[:, None])  # [m, 1]
    own = (logits - largest).exp_()
    return own.sum(-1).log_() + largest[:, 0], own


def token_figures(
    logits: Tensor,
    own: Tensor,
    logsumexp: Tensor,
    argmax: Tensor,
    following: Tensor,
    temperature: float,
) -> Tensor:
    """Return the `FIGURES` of tokens with a supervised next token, float32 [m, 4].

    Args:
        logits: float32 [m, V].
        own: as `log_sum_exp` returns it, float32 [m, V].
        logsumexp: of the logits, float32 [m].
        argmax: of the logits, int64 [m].
        following: the next token, int64 [m].
        temperature: the one of the target's own samples; 0 is greedy.
    """
    chosen = logits.gather(-1, following[:, None])[:, 0]  # [m]
    largest = logits.gather(-1, argmax[:, None])[:, 0]  # [m]
    if temperature == 0:
        own_logit, own_first = largest, torch.ones_like(largest)
    elif temperature == 1:
        own_first = (largest - logsumexp).exp()
        # Probabilities of the own samples, [m, V], but for a factor.
        own_logit = _expectation(own, logits) * own_first
    else:
        own = torch.softmax(logits / temperature, -1)
        own_first = own.gather(-1, argmax[:, None])[:, 0]
        own_logit = _expectation(own, logits)
    nll = (logsumexp - chosen).clamp(max=_LARGEST_NLL)
    first = (argmax == following).float()
    return torch.stack([first, nll, logsumexp - own_logit, own_first], -1)


def _expectation(probabilities: Tensor, logits: Tensor) -> Tensor:
    """Return the sum of p * z over the vocabulary, [m]; a logit of -inf has no share in it.

    `probabilities` [m, V] may lack a common factor.
    """
    if logits.device.type == "cpu":  # elsewhere, this question would wait for the device
        total = torch.einsum("mv,mv->m", probabilities, logits)
        if bool(total.isfinite().all()):
            return total
    return (probabilities * logits.clamp_min(-_LARGEST_NLL)).sum(-1)
