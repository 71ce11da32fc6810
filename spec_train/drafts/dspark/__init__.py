"""DSpark: a block draft with Markov and confidence heads."""
