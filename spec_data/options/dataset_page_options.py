"""The options of `spec-data report` and `spec-data preview`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_data.options.generate_options import GenerateConfig
from spec_data.options.option_values import REQUIRED, at_least
from spec_data.options.row_options import read_data_option
from spec_data.terminal.config import option

SHOWN = "what is shown"


def _same(name: str) -> Any:
    """Return a field with the default and the help of the option of `generate` with this name."""
    found = next(f for f in dataclasses.fields(GenerateConfig) if f.name == name)
    if found.default is dataclasses.MISSING:
        return dataclasses.field(metadata=found.metadata)
    return dataclasses.field(default=found.default, metadata=found.metadata)


def named_place(data: str) -> Path:
    """Return the path (or the URL as one) of a dataset, so that its last part is a name."""
    place = Path(data)
    return place.resolve() if place.name in ("", "..") else place


def _documents() -> Any:
    return option(
        1000,
        help="documents that the viewer of the page holds at most, evenly spaced, and 4,000,000 "
        "tokens at most; the page says how many. Figures are of all documents",
        group=SHOWN,
        metavar="N",
    )


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Options of `report`."""

    data: str = read_data_option()
    out: str | None = option(
        None,
        help="the HTML file to write; not given: DIR.html beside the dataset, or NAME.html here "
        "for a URL",
        group=SHOWN,
        metavar="FILE",
    )
    documents: int = _documents()
    scored: int | None = option(
        None,
        help="documents of the viewer, evenly spaced, for which the target's entropy and the "
        "probability of every token are computed from the stored states; 0: none. Not given: 32, "
        "or fewer where the head is so large that they would take minutes on a CPU",
        group=SHOWN,
        metavar="N",
    )

    def __post_init__(self) -> None:
        at_least(1, documents=self.documents)
        at_least(0, scored=self.scored or 0)


@dataclass(frozen=True, kw_only=True)
class PreviewConfig:
    """Options of `preview`: those of `generate` that decide which documents a corpus becomes."""

    corpus: tuple[str, ...] = _same("corpus")
    target: str = option(
        help="the target model, or a directory with its tokenizer alone; no weights are read",
        group=REQUIRED,
        metavar="MODEL",
    )
    out: str = option("preview.html", help="the HTML file to write", group=SHOWN, metavar="FILE")
    documents: int = _documents()
    max_length: int = _same("max_length")
    limit: int = _same("limit")
    mask: str = _same("mask")
    on_bad_row: str = _same("on_bad_row")
    max_bad_rows: str = _same("max_bad_rows")
    max_row_bytes: str = _same("max_row_bytes")
    num_proc: int = _same("num_proc")
    chat_template_kwargs: str = _same("chat_template_kwargs")
    revision: str | None = _same("revision")
    trust_remote_code: bool = _same("trust_remote_code")

    def __post_init__(self) -> None:
        at_least(1, documents=self.documents)
        _ = self.as_generate()

    def as_generate(self) -> GenerateConfig:
        """Return the options of the `generate` that would capture these documents.

        Raises:
            ConfigError: a value that `generate` refuses.
        """
        names = {f.name for f in dataclasses.fields(GenerateConfig)} - {"out"}
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in names}
        return GenerateConfig(**own, out="DIR")
