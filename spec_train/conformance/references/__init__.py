"""Every draft in plain loops of float64, written from the papers and the engines' sources.

No batch, no packing, no cache, no code shared with the fast drafts, so that a mistake there cannot
be here. The tests compare both; the conformance vectors are computed here alone.
"""
