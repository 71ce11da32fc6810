"""From the conversations of a corpus to the same questions with the target's own answers.

`run.regenerate` is the whole of it: it reads a corpus (`conversations.py`), lets the target write
the assistant turns (`local.py`, or `servers.py` where it runs behind servers), keeps every answer
in a journal at once, and writes the conversations in corpus order with a record of how they were
sampled. No states are captured here.
"""
