"""Faults injected into training by gloo workers, and whether anything was lost: ``python -m tests.faults``."""
