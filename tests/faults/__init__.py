"""Campaigns of planted faults: damage, crafted files, kills. Bounded, seeded, longer on request.

SPEC_FAULTS=20 runs twenty times as many trials; SPEC_FAULTS_SEED=7 draws others. Every campaign
prints its seed and its counts (pytest -s shows them; a failure does too).
"""
