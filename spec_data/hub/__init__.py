"""Room: datasets on the Hugging Face Hub."""
