"""EAGLE-3 and 3.1, trained by the training-time test."""
