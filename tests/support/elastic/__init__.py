"""Workers under torchft's Manager, one of which is killed, and what the others must still owe."""
