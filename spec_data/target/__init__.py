"""Room: everything that touches the target model.

Loads the model, finds its decoder blocks and its head, captures states with forward hooks, builds
the attention masks that keep packed documents apart, and proves both the masks and the head.

May import: spec_data.shards, spec_data.devices.
"""
