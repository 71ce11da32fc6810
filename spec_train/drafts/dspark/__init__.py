"""DSpark and DFlash, which draft a block of tokens in one forward pass."""
