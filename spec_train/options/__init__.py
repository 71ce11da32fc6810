"""Room: the options of `spec-train fit` and of the drafts, as dataclasses; no torch here."""
