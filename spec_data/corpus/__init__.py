"""Room: from corpus sources to documents.

Reads conversations from files and Hugging Face datasets, renders them with the tokenizer's chat
template, and returns documents: token ids, loss mask and turns. No model is loaded here.

May import: spec_data.shards.
"""
