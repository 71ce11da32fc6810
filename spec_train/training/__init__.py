"""Room: `spec-train fit`: one loop for every draft.

Prepares a run, trains it on one or several ranks, saves it and resumes it. No module here names a
kind of draft: the loop calls only the methods of `Draft`.
"""
