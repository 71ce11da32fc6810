"""Conformance vectors for engine writers: tiny drafts, what they must draft, and a checker of logs.

Every expected number comes from the `reference` of a draft, never from the code that trains and
decodes.
"""
