"""From the conversations of a corpus to the same questions with the target's own answers.

Reads a corpus, lets the target (loaded here, or behind servers) write the assistant turns, keeps
every answer in a journal at once, and writes the conversations in corpus order with a record of how
they were sampled. An answer belongs to a turn; a turn of a conversation is answered after the turns
before it. No states are captured here.
"""
