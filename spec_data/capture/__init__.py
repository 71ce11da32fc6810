"""Everything that touches the target model.

Finds its decoder blocks and its head, captures states with forward hooks, and
builds the attention masks that keep packed documents apart. `served` takes the states of a server
instead, and `evidence` finds which states these are. Before anything is stored it proves
that the masks isolate documents and that the head is described correctly.
"""
