"""What drafts are trained on: the head, losses, metrics, sampling, by tiles."""
