"""Ranks under a byte budget: planned, in force, reported."""
