"""The proofs by name of the part."""

from collections.abc import Callable

from gpu.bench import Bench
from gpu.commands import prove_capture, prove_decoding, prove_fit, prove_resume
from gpu.drafts import prove_drafts, prove_speed
from gpu.kernels import prove_codecs, prove_kernels, prove_machine, prove_ring

PROOFS: dict[str, Callable[[Bench], None]] = {
    "machine": prove_machine,
    "codecs": prove_codecs,
    "kernels": prove_kernels,
    "drafts": prove_drafts,
    "capture": prove_capture,
    "ring": prove_ring,
    "fit": prove_fit,
    "speed": prove_speed,
    "decoding": prove_decoding,
    "resume": prove_resume,
}
