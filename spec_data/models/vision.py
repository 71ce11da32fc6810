"""The image processor of a target: what it makes of images, and the tokens that stand for them."""

import io
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_data.shards.errors import MissingError, TargetError
from spec_data.shards.files import sha256_json

if TYPE_CHECKING:
    from torch import Tensor

WITH_IMAGES = ("gemma3", "llava")
"""Model types whose states of images were compared with those of the plain model."""
MOST_STRETCHED = 200
"""The longer side of an image by the shorter one, at most: processors enlarge the shorter one."""
_KEPT = 256  # texts of images
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV")
_TYPES = ("mm_token_type_ids", "token_type_ids")


def takes_images(config: Any) -> bool:
    """Return whether a transformers configuration is of a model with a vision part."""
    return getattr(config, "vision_config", None) is not None


def decode(data: bytes, most_pixels: int | None = None) -> Any:
    """Return a PIL image in RGB, turned as its EXIF data say.

    Raises:
        ValueError: it is no image, is damaged, is no plain picture (several frames, transparent,
            more than 8 bits), or has too many pixels, which is known before anything is decoded.
        MissingError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MissingError(
            "rows with images need Pillow, which is not installed: pip install pillow"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # bounded below
            image = Image.open(io.BytesIO(data))
            if not (reason := _unusual(image, most_pixels)):
                turned = ImageOps.exif_transpose(image)
                if not _see_through(turned):
                    return turned.convert("RGB")
                reason = "it is transparent, and engines differ in what is behind; fill it"
    except MemoryError:
        raise
    except Exception as error:  # of any of Pillow's many formats
        text = " ".join(str(error).split())[:100]
        raise ValueError(f"it cannot be decoded ({type(error).__name__}: {text})") from None
    raise ValueError(reason)


def _unusual(image: Any, most_pixels: int | None) -> str:
    """Return why an image that is not decoded yet is not taken, or ""."""
    width, height = image.size
    if most_pixels is not None and width * height > most_pixels:
        return f"it has {width} x {height} pixels (at most {most_pixels:,}; see --max-image-pixels)"
    if max(width, height) > MOST_STRETCHED * min(width, height):
        return f"it has {width} x {height} pixels (sides of at most 1 : {MOST_STRETCHED})"
    if image.format != "MPO" and getattr(image, "is_animated", False):  # of a phone: one picture
        return "it has several frames or pages; give one"
    if image.mode not in _MODES:
        return f"it has values of the kind {image.mode}, not of 8 bits"
    return ""


def _see_through(image: Any) -> bool:
    if image.mode not in ("LA", "PA", "RGBA", "La", "RGBa") and "transparency" not in image.info:
        return False
    return bool(image.convert("RGBA").getextrema()[3][0] < 255)


class Vision:
    """The processor in a target's directory; it is loaded for the first image.

    Its methods raise TargetError where this release of transformers cannot use it here, and may
    raise anything that the code of a processor raises.
    """

    def __init__(self, directory: Path, trust: bool = False) -> None:
        self._directory, self._trust = directory, trust
        self._expansions: dict[str, str] = {}

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        directory = self._directory
        try:
            made = AutoProcessor.from_pretrained(directory, trust_remote_code=self._trust)
        except (ValueError, OSError, ImportError, KeyError, TypeError, AttributeError) as error:
            raise TargetError(
                f"{directory}: its image processor cannot be loaded "
                f"({' '.join(str(error).split())[:300]})"
            ) from None
        if not getattr(made, "image_token", None) or not hasattr(made, "replace_image_token"):
            raise TargetError(
                f"{directory}: {type(made).__name__} does not say which tokens stand for an image"
            )
        return made

    @property
    def token(self) -> str:
        """What chat templates write for an image."""
        token: str = self._processor.image_token
        return token

    @cached_property
    def digest(self) -> str:
        """The hash of what decides the pixels that the model reads."""
        processor = self._processor
        table = processor.image_processor.to_dict()
        own = {k: v for k, v in vars(processor).items() if isinstance(v, int | float | str)}
        own.pop("chat_template", None)
        return sha256_json({"class": type(processor).__name__, "image": table, "own": own})

    def expansion(self, digest: str, data: bytes) -> str:
        """Return the text that stands for an image with a digest."""
        if digest in self._expansions:
            return self._expansions[digest]
        processed = self._processor.image_processor(images=[decode(data)])
        text: str = self._processor.replace_image_token(processed, image_idx=0)
        while len(self._expansions) >= _KEPT:
            del self._expansions[next(iter(self._expansions))]
        self._expansions[digest] = text
        return text

    def ids(self, text: str, images: Sequence[bytes]) -> list[int]:
        """Return what the processor makes of a text with a placeholder for each image."""
        made = self._made(text, images)
        ids: list[int] = made["input_ids"][0].tolist()
        return ids

    def types(self, ids: Sequence[int]) -> list[int]:
        """Return 1 at the tokens that stand for parts of an image."""
        made = self._processor.create_mm_token_type_ids([list(ids)])[0]
        return [int(kind == 1) for kind in made]

    def inputs(self, ids: "Tensor", images: Sequence[bytes]) -> dict[str, "Tensor"]:
        """Return what the model reads beside the token ids, int64 [1, T], of one document."""
        made = self._made(self.token * len(images), images)
        given = {k: v for k, v in made.items() if k not in ("input_ids", "attention_mask")}
        kinds = ids.new_tensor([self.types(ids[0].tolist())])
        for name in _TYPES:
            if name in given:
                given[name] = kinds
        return given

    def _made(self, text: str, images: Sequence[bytes]) -> dict[str, Any]:
        decoded = [decode(data) for data in images]
        made = self._processor(
            text=[text], images=decoded, add_special_tokens=False, return_tensors="pt"
        )
        return dict(made)
