"""Which forms of an export an engine cannot read, though it serves the draft in another form.

Found by converting and loading (llama.cpp 0.5.0) and in the sources of the releases in `rules`. A
pair that is not listed is not known to fail.
"""

from spec_train.formats.preflight_notes import Subject

_CLASSES = ("deepspec", "transformers")
"""Forms with class names of their own."""


def unread_form(engine: str, subject: Subject) -> str | None:
    """Return why an engine cannot read the form of `subject`, and what to write; None if it can."""
    kind, form = subject.kind, subject.form
    several = kind == "eagle3" and subject.blocks > 1
    if form == engine or (engine == "vllm-cpu" and form == "vllm"):
        return None
    if engine == "sglang" and form == "speculators":
        return "reads no speculators form; export with --format sglang"
    if engine == "llama.cpp" and form == "speculators" and kind == "dflash":
        return "its converter does not know speculators' form of DFlash; export with --format vllm"
    if engine in ("vllm", "vllm-cpu", "llama.cpp") and form == "sglang" and several:
        return "the norms of later layers have SGLang's names; export with --format vllm"
    if engine == "sglang" and form == "vllm" and several:
        return "the norms of later layers have vLLM's names; export with --format sglang"
    if engine in ("speculators", *_CLASSES):
        return f"reads its own form only; export with --format {engine}"
    if form == "transformers":
        own = "sglang" if engine == "sglang" else "vllm"
        return f"does not know transformers' class and names; export with --format {own}"
    return None
