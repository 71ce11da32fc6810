"""From corpus sources to documents.

Reads conversations from files and Hugging Face datasets, renders them with the tokenizer's chat
template, and returns documents: token ids, loss mask and turns. No model is loaded here. A corpus
row is what a file stores, a record is a row whose format is recognised, a document is what a
record becomes once it is rendered. `spec-train eval` reads and renders its prompts here too.
"""
