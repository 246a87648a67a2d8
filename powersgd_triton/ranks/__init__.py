"""Ranks under a byte budget: the planner, the plan in force, and the report."""
