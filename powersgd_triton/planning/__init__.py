"""Predictions and measurements of the time that steps take, and the compression that follows from them."""
