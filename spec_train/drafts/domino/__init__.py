"""Domino: DFlash with a recurrent head."""
