"""Faults injected into training by gloo workers, and a ledger of what the workers must still owe."""
