"""Adapters. Each translates a framework's gradients into named gradients for the engine, and writes back averages."""

if __name__ != "powersgd_triton.integrations":
    raise ImportError(f"import the adapters as `from powersgd_triton.integrations import ddp`, not from {__name__!r}")
