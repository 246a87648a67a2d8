"""Helpers that test files share. Nothing here imports a test."""
