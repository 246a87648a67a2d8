"""The engine, its memory between steps, and saved states."""
