"""Which class of transformers reads a tokenizer: one rule for targets and datasets.

transformers chooses the class by what is installed: beside a tekken.json it hands out
`MistralCommonBackend` where mistral-common is, as in every environment of vLLM. That one renders
no conversation that ends with an answer, and its texts do not have its tokens ([INST] is one token,
and four in a text). So the fast tokenizer is used where its files are.
"""

from pathlib import Path
from typing import Any

_MISTRAL_COMMON = "MistralCommonBackend"


def usual_tokenizer(directory: Path, trust: bool = False) -> Any:
    """Return the tokenizer that transformers reads, the fast one instead of mistral-common's.

    Any exception: there is none. It takes seconds of imports.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust)
    if type(tokenizer).__name__ == _MISTRAL_COMMON:
        return PreTrainedTokenizerFast.from_pretrained(str(directory))
    return tokenizer
