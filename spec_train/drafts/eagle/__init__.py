"""EAGLE-1/2, which predicts the target's next final hidden state."""
