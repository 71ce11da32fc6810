"""The quantisation that a manifest records, in words."""

from typing import Any


def quantisation_text(found: dict[str, Any]) -> str:
    """Return a quantisation in words, such as "fp8, 8 bits, dequantised when it was loaded"."""
    bits = f", {found['bits']} bits" if "bits" in found else ""
    run = ", dequantised when it was loaded" if found.get("dequantised") else ""
    return f"{found['method']}{bits}{run}"
